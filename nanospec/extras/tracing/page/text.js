// The text of a request: every token a span, coloured by where it came from.

let spans = []; // by index in prompt + output
let marked = [];
const LINE = 21; // pixels, about

function drawText(lane) {
  const box = $("text");
  spans = lane.prompt.map((text) => make("span", isSpecial(text) ? "t prompt special" : "t prompt", printable(text, false)));
  lane.origins.forEach(({ step, place }, i) => {
    const span = make("span", `t output ${kind(step, place)}`, printable(lane.output[i] ?? "", false));
    span.dataset.output = i;
    spans.push(span);
  });
  box.replaceChildren(...spans);
  marked = [];
  shownUpTo = spans.length;
  drawLegend(lane);
}

function drawLegend(lane) {
  const all = lane.steps.flatMap((step) => step.sources);
  const guesses = [
    ...(all.some((source) => source >= 0) ? [["copied", "copied from earlier text"]] : []),
    ...(all.some((source) => source < 0) ? [["guessed", "guessed otherwise"]] : []),
  ];
  const entries = ([name, words]) => make("li", "", make("i", name, "abc"), words);
  $("legend").replaceChildren(
    ...[["t prompt", "prompt"], ["t own", "the model's own"], ...guesses].map(entries),
    ...(all.some((source) => source >= 0) ? [["found", "looked up, and found"]] : []).map(entries),
  );
  $("hint").hidden = !lane.isGuessed;
  $("guess-legend").replaceChildren(
    ...guesses.map(([name, words]) => entries([`g ${name}`, `${words}, right`])),
    ...[["g own", "the model's own"]].map(entries),
    ...(lane.isGuessed ? [["g rejected", "wrong, thrown away"]] : []).map(entries),
    ...(lane.steps.some((step) => step.verified < step.drafts.length) ? [["g unchecked", "not checked"]] : []).map(entries),
  );
}

/** Take all marks off the text. */
function unmark() {
  for (const span of marked) span.classList.remove("now", "query", "found", "source");
  marked = [];
}

function mark(from, to, name) {
  for (let i = Math.max(from, 0); i < to && i < spans.length; i++) {
    spans[i].classList.add(name);
    marked.push(spans[i]);
  }
}

/** Mark what a step looked up, where it found that, and what it wrote. */
function markStep(lane, step) {
  unmark();
  const begin = lane.offset + step.first;
  mark(begin, begin + step.tokens.length, "now");
  const copied = step.sources.findIndex((source) => source >= 0);
  if (copied >= 0) {
    const found = step.sources[copied] - step.depths[copied + 1] + 1;
    mark(begin - step.match_len, begin, "query");
    mark(found - step.match_len, found, "found");
  }
}

/** Bring a token into view by moving the text alone, not the page. */
function showToken(index) {
  const span = spans[index], box = $("text");
  if (!span) return;
  const top = span.offsetTop, height = box.clientHeight, margin = Math.min(2 * LINE, height / 4);
  if (top < box.scrollTop + LINE / 2) box.scrollTop = top - margin;
  else if (top > box.scrollTop + height - 2 * LINE) box.scrollTop = top - height + margin + LINE;
}

/** Show the first `end` tokens of prompt + output; the others stay where they are, faint. */
let shownUpTo = 0;
function revealUpTo(end) {
  for (let i = Math.min(end, shownUpTo); i < Math.max(end, shownUpTo) && i < spans.length; i++) {
    spans[i].classList.toggle("future", i >= end);
  }
  shownUpTo = end;
}
