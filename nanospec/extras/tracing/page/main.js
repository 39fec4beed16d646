// Selection, page texts, and keyboard and pointer events.

const state = { lane: 0, step: -1, place: 0 };
const lane = () => trace.lanes[state.lane];
const rowOf = (index) => $(`step-${index}`);

function selectLane(index) {
  state.lane = (index + trace.lanes.length) % trace.lanes.length;
  state.step = -1;
  trace.lanes.forEach((other, i) => other.button?.setAttribute("aria-pressed", String(i === state.lane)));
  lane().button?.scrollIntoView({ block: "nearest" });
  stopPointing();
  drawText(lane());
  drawSteps(lane());
  drawRace(lane());
  const { steps } = lane(), most = Math.max(...steps.map((step) => step.tokens.length));
  selectStep(steps.findIndex((step) => step.tokens.length > most / 2), false); // the first productive step
}

/** Select a step; if `follow`, scroll it into view. */
function selectStep(index, follow = true) {
  const step = lane().steps[index];
  if (!step) return;
  stopPointing();
  const old = rowOf(state.step);
  if (old && state.step !== index) {
    old.setAttribute("aria-selected", "false");
    old.querySelector(".detail")?.remove();
  }
  const row = rowOf(index);
  if (row.getAttribute("aria-selected") !== "true") {
    row.setAttribute("aria-selected", "true");
    row.append(drawDetail(lane(), step));
  }
  Object.assign(state, { step: index, place: 0 });
  $("steps").setAttribute("aria-activedescendant", row.id);
  markStep(lane(), step);
  showToken(lane().offset + step.first + step.tokens.length - 1);
  showToken(lane().offset + step.first);
  if (follow) row.scrollIntoView({ block: "nearest" });
  $("live").textContent = `Step ${index + 1} of ${lane().steps.length}. ${story(lane(), step)}`;
}

/** Move the pointer by `by` drafts within the selected step. */
function movePlace(by) {
  const step = lane().steps[state.step];
  if (!step?.drafts.length) return;
  const n = step.drafts.length, place = state.place ? ((state.place - 1 + by + n) % n) + 1 : by > 0 ? 1 : n;
  const element = rowOf(state.step).querySelector(`[data-place="${place}"]`);
  markStep(lane(), step);
  pointAt(lane(), step, place, element);
  state.place = place;
  $("live").textContent = $("tip").textContent;
}

function play() {
  stopPointing();
  const { offset, steps } = lane();
  playRace((time) => {
    const written = tokensWithDrafts(lane(), time);
    revealUpTo(offset + written);
    showToken(offset + Math.max(written - 1, 0));
    const current = written ? lane().origins[written - 1].step.index : 0;
    if (current !== state.step && steps.length < 400) selectStep(current, false);
  });
}

// Page texts

function drawHead() {
  const { about, lanes } = trace, tokens = sum(lanes.map((l) => l.token_ids.length)), steps = sum(lanes.map((l) => l.steps.length));
  const how = {
    ngram: "n-gram lookup", none: "no speculation", dflash: "DFlash", eagle3: "EAGLE-3", draft: "draft model",
  };
  const run = `${about.dtype} on ${about.device}${about.by ? ` (${about.by})` : ""}`;
  const named = about.method.split("+").map((name) => how[name] ?? name).join(", then ");
  $("about").textContent = [about.model, run, named, about.method === "none" ? "" : `K = ${about.k}`].filter(Boolean).join(" · ");
  const many = lanes.length > 1 ? `${count(lanes.length, "request")}: ` : "";
  $("headline").replaceChildren(`${many}${count(tokens, "token")} in `, make("em", "", count(steps, "step")));
  document.title = `${many}${count(tokens, "token")} in ${count(steps, "step")} · nanospec trace`;
  const all = {};
  lanes.forEach((l) => l.steps.forEach((s) => Object.entries(s.ms).forEach(([k, ms]) => (all[k] = (all[k] ?? 0) + ms / s.batch))));
  const total = sum(Object.values(all)), shares = Object.entries(all).filter(([, ms]) => ms / total >= 0.001);
  const drafted = sum(lanes.map((l) => sum(l.steps.map((s) => s.verified))));
  const accepted = sum(lanes.map((l) => sum(l.steps.map((s) => s.accepted.length))));
  const rate = drafted ? `Acceptance rate: ${Math.round((100 * accepted) / drafted)}% (${accepted} of ${count(drafted, "verified draft")}). ` : "";
  const where = shares.map(([stage, ms]) => `${STAGES[stage] ?? stage} ${few((100 * ms) / total)}%`).join(", ");
  $("facts").textContent = total ? `${rate}Time by stage: ${where}.` : rate;
}

function drawLead() {
  const { lanes } = trace, tokens = sum(lanes.map((l) => l.token_ids.length)), steps = sum(lanes.map((l) => l.steps.length));
  const perStep = make("b", "", `${few(tokens / Math.max(steps, 1))} tokens per step`);
  const guarantee = lanes.some((l) => l.acceptance === "typical")
    ? "Typical acceptance also keeps drafts that the model finds likely enough, which changes the output."
    : "The output is the same as without speculation.";
  $("lead").replaceChildren(
    ...(lanes.some((l) => l.hasDrafts)
      ? [perStep, `, compared to one without speculation. Before each step, a drafter proposes the next tokens, and one
        forward pass of the model verifies all of them. Drafts are accepted up to the first mismatch, where the model's
        own token is used instead. ${guarantee}`]
      : [perStep, ": nothing was drafted, so every forward pass generated one token."]),
  );
}

// Events

const KEYS = {
  ArrowDown: () => selectStep(Math.min(state.step + 1, lane().steps.length - 1)),
  ArrowUp: () => selectStep(Math.max(state.step - 1, 0)),
  Home: () => selectStep(0),
  End: () => selectStep(lane().steps.length - 1),
  ArrowRight: () => movePlace(1),
  ArrowLeft: () => movePlace(-1),
  Escape: stopPointing,
  " ": play,
  t: toggleTheme,
  "[": () => selectLane(state.lane - 1),
  "]": () => selectLane(state.lane + 1),
};

document.addEventListener("keydown", (event) => {
  const action = KEYS[event.key];
  const onButton = event.target.closest("button") && [" ", "Enter"].includes(event.key);
  if (!action || onButton || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
});

$("steps").addEventListener("click", (event) => {
  const row = event.target.closest(".step");
  if (row) selectStep(Number(row.dataset.step), false);
});
$("steps").addEventListener("pointerover", (event) => {
  const element = event.target.closest("[data-place]");
  if (!element) return stopPointing();
  const step = lane().steps[Number(element.closest(".step").dataset.step)];
  if (step.index !== state.step) unmark();
  pointAt(lane(), step, Number(element.dataset.place), element);
});
$("steps").addEventListener("pointerleave", () => {
  stopPointing();
  if (state.step >= 0) markStep(lane(), lane().steps[state.step]);
});
$("text").addEventListener("pointerover", (event) => {
  const element = event.target.closest("[data-output]");
  if (!element) return stopPointing();
  const { step, place } = lane().origins[Number(element.dataset.output)];
  if (place) pointAt(lane(), step, place, element);
  else stopPointing();
});
$("text").addEventListener("pointerleave", stopPointing);
$("text").addEventListener("click", (event) => {
  const element = event.target.closest("[data-output]");
  if (element) selectStep(lane().origins[Number(element.dataset.output)].step.index);
});
$("replay").addEventListener("click", play);
$("theme").addEventListener("click", toggleTheme);
addEventListener("scroll", redraw, { passive: true, capture: true });
addEventListener("resize", repaint);

function repaint() {
  redraw();
  paintLanes();
  if (race) drawTracks();
}

// Light and dark theme: the system's setting until the user toggles it

const system = matchMedia("(prefers-color-scheme: dark)");
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  repaint();
}
function toggleTheme() {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}
system.addEventListener("change", () => setTheme(system.matches ? "dark" : "light"));
document.documentElement.dataset.theme = system.matches ? "dark" : "light";

drawHead();
drawLead();
drawLanes(selectLane);
if (trace.lanes.length) selectLane(0);
