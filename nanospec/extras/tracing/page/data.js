// The data, and what is derived from it. Names are those of `StepRecord` and `Lane` in Python.

const trace = JSON.parse(document.getElementById("trace").textContent);
const GUESSED = -2; // the source of a model's guess
const STAGES = {
  prefill: "prompt", propose: "guessing", forward: "the model", verify: "checking", wait: "waiting for the device", host: "host",
};

const $ = (id) => document.getElementById(id);

/** An element with a class, and texts or elements in it. */
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const few = (x, digits = 1) => x.toFixed(x >= 100 ? 0 : digits);
const seconds = (s) => (s < 1 ? `${Math.round(1000 * s)} ms` : `${few(s, 2)} s`);

/** Control characters as pictures; line breaks and tabs only if `whole`, for text that stands in one line. */
function printable(text, whole = true) {
  let shown = text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)));
  shown = shown.replace(/\u007f/g, "␡").replace(/[\u2028\u2029]/g, "↵");
  if (!whole) return shown;
  shown = shown.replace(/\n/g, "↵").replace(/\t/g, "⇥");
  return /^ +$/.test(shown) ? "␣".repeat(shown.length) : shown;
}

/** A token's own text, as it is shown by itself. */
function tokenText(id) {
  const text = trace.texts[id] ?? String(id);
  return /^\ufffd+$/.test(text) ? "◌" : printable(text) || "∅";
}

/** Where each output token came from: its step, and its place among the step's guesses, 0 if it is the
 * model's own. */
function prepare(lane) {
  lane.offset = lane.prompt.length;
  lane.texts = lane.prompt.concat(lane.output);
  lane.origins = [];
  lane.steps.forEach((step, index) => {
    step.index = index;
    step.first = lane.origins.length;
    step.own = step.tokens.length > step.accepted.length ? step.tokens[step.accepted.length] : null;
    step.depths = depths(step);
    step.total = sum(Object.values(step.ms));
    for (let j = 0; j < step.tokens.length; j++) lane.origins.push({ step, place: step.accepted[j] ?? 0 });
  });
  lane.seconds = lane.steps.length ? lane.steps.at(-1).at : lane.seconds;
  lane.excerpt = excerpt(lane);
  lane.isGuessed = lane.steps.some((step) => step.drafts.length);
}

/** How deep in the tree each place is; place 0 is the last token before the step. */
function depths(step) {
  const found = [0];
  step.parents.forEach((parent) => found.push(found[parent] + 1));
  return found;
}

/** What the request is about: the last stretch of its prompt between special tokens that names no role. */
function excerpt(lane) {
  const parts = lane.prompt.map((text) => (isSpecial(text) ? "\u0000" : text)).join("").split("\u0000");
  const words = parts.map((part) => part.trim().replace(/^(user|system|assistant|model)(\n|$)/, "").trim());
  return (words.filter(Boolean).at(-1) ?? lane.prompt.join("")).replace(/\s+/g, " ").slice(0, 160);
}

const isSpecial = (text) => /^<[|/]?[\w ]+\|?>$/.test(text) && text.length > 4;

const GUESSERS = {
  draft: "the draft model", medusa: "Medusa heads", grammar: "the grammar",
};

/** Who made the guesses of a step that were not looked up, in words. */
function guessers(step) {
  const methods = step.method.split("+").filter((method) => method !== "ngram");
  return methods.map((method) => GUESSERS[method] ?? (method || "a model")).join(" or ");
}

/** Who made a guess, in words. */
function guesser(step, place) {
  if (step.sources[place - 1] >= 0) return "looked up";
  return step.method === "medusa" ? `guessed by Medusa head ${step.depths[place]}` : `guessed by ${guessers(step)}`;
}

/** How a token came to be: "own", "copied" or "guessed". */
function kind(step, place) {
  return place === 0 ? "own" : step.sources[place - 1] >= 0 ? "copied" : "guessed";
}

trace.lanes.forEach(prepare);
