// Selecting a token with the pointer or arrow keys, which shows its description and where it was copied from.

import { state } from "./chat.js";
import { hideOrigin, showOrigin } from "./origins.js";
import { showFigures } from "./stats.js";

const $ = (id) => document.getElementById(id);
let pointed = null; // {span, shown}: a token and its answer

/** The turn and the answer that contain an element. */
function place(element) {
  const turn = state.turns.find((one) => one.element.contains(element));
  return { turn, shown: turn?.answers.find((one) => one.element.contains(element)) };
}

function point(span) {
  unpoint();
  const { turn, shown } = place(span), token = shown?.places.get(span);
  if (!token) return;
  pointed = { span, shown };
  span.classList.add("pointed");
  $("tip").textContent = shown.tip(span);
  $("tip").hidden = false;
  placeTip(span.getClientRects()[0]);
  if (token.kind !== "copied") return;
  showOrigin(shown, shown.stretch(token), messagesOf(turn, shown), state.key, () => pointed?.span === span);
}

function placeTip(box) {
  const { style, offsetWidth: width, offsetHeight: height } = $("tip");
  style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
  style.top = `${box.top < height + 16 ? box.bottom + 8 : box.top - height - 8}px`;
}

/** The messages of an answer's request, with the elements that show them. */
function messagesOf(turn, shown) {
  const before = state.turns.slice(0, state.turns.indexOf(turn));
  const elements = before.flatMap((other) => [[other.content, other.message], [other.text, other.answers[0]?.text]]);
  const byContent = new Map([...elements, [turn.content, turn.message]]);
  return shown.run.request.messages.map(({ content }) => ({ content, element: byContent.get(content) }));
}

export function unpoint() {
  pointed?.span.classList.remove("pointed");
  pointed = null;
  $("tip").hidden = true;
  hideOrigin();
}

$("turns").addEventListener("pointermove", ({ target }) => {
  if (target !== pointed?.span) point(target.closest(".t")); // unlike pointerover, not for text that scrolls by
});
$("turns").addEventListener("pointerleave", unpoint);
$("turns").addEventListener("focusout", unpoint);
$("turns").addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], { shown } = place(event.target);
  if (event.key === "Escape") unpoint();
  if (!by || event.target !== shown?.text) return;
  event.preventDefault();
  const span = shown.next(pointed?.shown === shown ? pointed.span : null, by);
  span?.scrollIntoView({ block: "nearest" });
  point(span);
  if (span) $("status").textContent = `${span.textContent}: ${$("tip").textContent}`;
});
$("turns").addEventListener("click", (event) => {
  const { shown } = place(event.target);
  if (shown) showFigures(shown.run);
  point(event.target.closest(".t")); // on touch screens there is no pointermove before
});
addEventListener("scroll", () => pointed && placeTip(pointed.span.getClientRects()[0]), { passive: true, capture: true });
