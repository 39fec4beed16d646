// Sends messages, shows the answers while they stream, stops and repeats them.

import { Answer, button } from "./answer.js";
import { Turn, state } from "./chat.js";
import { EXAMPLES } from "./examples.js";
import { unpoint } from "./pointing.js";
import { Run } from "./run.js";
import { chooseSchema, chosen, offer, showChosen } from "./settings.js";
import { showFigures } from "./stats.js";
import { ServerError, ask, chunks } from "./stream.js";

const $ = (id) => document.getElementById(id);
const showStatus = (text) => ($("status").textContent = text);

async function loadModel() {
  try {
    const { data } = await (await ask("v1/models", { key: state.key })).json();
    state.model = data[0];
    offer(state.model);
    showStatus("");
  } catch (error) {
    if (error.status === 401) askForKey(null);
    showStatus(error.message);
  }
}

// Sending

async function send(content) {
  if (state.abort) return showStatus("An answer is being generated; wait or press Stop.");
  if (!content.trim()) return;
  const turn = new Turn(content.trim());
  state.turns.push(turn);
  $("turns").append(turn.element);
  $("welcome").hidden = true;
  $("new").disabled = false;
  $("prompt").value = "";
  await answer(turn);
}

const as = (role, content) => ({ role, content });

/** Answer a turn with the current settings. */
async function answer(turn) {
  turn.forget(0);
  const retry = () => answer(turn);
  const before = state.turns.slice(0, state.turns.indexOf(turn)).filter((other) => other.text);
  const messages = before.flatMap((other) => [as("user", other.content), as("assistant", other.text)]);
  messages.push(as("user", turn.content));
  if ($("system").value.trim()) messages.unshift(as("system", $("system").value.trim()));
  try {
    if (!state.model) await loadModel();
    const request = { model: state.model?.id, messages, ...chosen() };
    const run = await write(turn, request, retry);
    const label = run?.isPlain ? "Repeat with speculation" : "Repeat without speculation";
    if (run && $("drafter").options.length > 1) turn.offerAgain(label, () => again(turn));
    scrollToEnd(isAtEnd());
  } catch (error) {
    turn.fail(error.message, retry);
    showStatus("");
  }
}

/** Repeat the request without speculation, or with it if the first answer was without. */
async function again(turn) {
  turn.forget(1);
  const { num_speculative_tokens, ...others } = turn.answers[0].run.request;
  const request = num_speculative_tokens === 0 ? others : { ...others, num_speculative_tokens: 0 };
  if (await write(turn, request, () => again(turn))) {
    showStatus(turn.compare());
    scrollToEnd(true);
  } else if (!turn.after.hasChildNodes()) turn.offerAgain("Repeat", () => again(turn));
}

/** Stream one answer into a turn. Return its run, or null if it was stopped or failed. */
async function write(turn, request, retry) {
  const run = new Run(request), shown = new Answer(run), abort = new AbortController();
  turn.add(shown);
  setBusy(abort);
  showFigures(run);
  scrollToEnd(true);
  showStatus(`${run.title}: generating ...`);
  const body = { ...request, stream: true, stream_options: { include_usage: true, include_drafts: true } };
  try {
    const response = await ask("v1/chat/completions", { body, key: state.key, signal: abort.signal });
    for await (const chunk of chunks(response)) {
      const wasAtEnd = isAtEnd();
      run.take(chunk);
      shown.draw();
      showFigures(run);
      $("struck-out").hidden &&= !run.tokens.some((token) => token.kind === "rejected");
      scrollToEnd(wasAtEnd);
    }
    showStatus(`Done: ${shown.note.textContent || "no text"}.`);
    return run;
  } catch (error) {
    failed(error, turn, shown, retry);
    return null;
  } finally {
    setBusy(null);
    scrollToEnd(isAtEnd());
  }
}

function failed(error, turn, shown, retry) {
  shown.element.hidden = !shown.run.text;
  if (error.name === "AbortError") {
    showStatus("Stopped.");
    shown.note.textContent += " · stopped";
    return;
  }
  if (!(error instanceof ServerError)) console.error(error);
  turn.fail(error.message, retry);
  showStatus("");
  if (error.status === 401) askForKey(retry);
}

function setBusy(abort) {
  state.abort = abort;
  $("send").hidden = Boolean(abort);
  $("stop").hidden = !abort;
  for (const element of document.querySelectorAll(".actions button, #examples button")) element.disabled = Boolean(abort);
}

function askForKey(retry) {
  state.afterKey = retry ?? state.afterKey;
  $("key-form").hidden = false;
  $("key").focus();
}

// Scrolling to the end, of the conversation, or on narrow screens of the page

const scroller = () => (getComputedStyle($("talk")).overflowY === "auto" ? $("talk") : document.scrollingElement);
const isAtEnd = (box = scroller()) => box.scrollHeight - box.scrollTop - box.clientHeight < 120;
const scrollToEnd = (when) => when && (scroller().scrollTop = scroller().scrollHeight);

// Event handlers

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("prompt").value);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send($("prompt").value);
});
$("stop").addEventListener("click", () => {
  state.abort?.abort();
  $("prompt").focus();
});
$("new").addEventListener("click", () => {
  state.abort?.abort();
  unpoint();
  Object.assign(state, { turns: [], afterKey: null });
  $("turns").replaceChildren();
  $("welcome").hidden = false;
  $("new").disabled = true;
  showFigures(null);
  $("prompt").focus();
});
$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  state.key = $("key").value;
  $("key").value = "";
  $("key-form").hidden = true;
  await loadModel();
  if (!$("key-form").hidden) return;
  const retry = state.afterKey;
  state.afterKey = null;
  $("prompt").focus();
  retry?.();
});
$("settings").addEventListener("change", showChosen);
$("show-rejected").addEventListener("change", ({ target }) => {
  document.body.classList.toggle("no-rejected", !target.checked);
});
$("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  dataset.theme = (dataset.theme ?? system()) === "dark" ? "light" : "dark";
});
const system = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
$("settings").open = matchMedia("(min-width: 901px)").matches;
$("examples").append(...EXAMPLES.map(([name, prompt, schema]) => button(name, () => {
  chooseSchema(schema && state.model?.structured_output ? schema : null);
  send(prompt);
})));
loadModel();
