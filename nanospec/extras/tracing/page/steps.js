// One row per step: what was looked up, the guesses, why so many, and where the time went.

const REASONS = { off: "no guessing", end: "the last token", fixed: "fixed", "does not pay": "does not pay", probe: "a probe" };

function drawSteps(lane) {
  const longest = Math.max(...lane.steps.map((step) => step.total - (step.ms.prefill ?? 0)), 1e-3);
  $("steps").replaceChildren(...lane.steps.map((step) => drawStep(lane, step, longest)));
}

function drawStep(lane, step, longest) {
  const row = make("li", "step");
  row.id = `step-${step.index}`;
  row.dataset.step = step.index;
  row.setAttribute("role", "option");
  row.setAttribute("aria-selected", "false");
  const gain = step.tokens.length;
  row.append(
    make(
      "div", "head",
      make("span", "n", `${step.index + 1}`), lookedUp(lane, step),
      whyBriefly(step),
      make("span", gain > 1 ? "gain" : "gain one", count(gain, "token")),
      make("span", "ms", stageBar(step, 58 / longest), `${few(step.total - (step.ms.prefill ?? 0))} ms`),
    ),
    drawGuesses(step),
  );
  return row;
}

/** The text that was looked up, or who guessed without. */
function lookedUp(lane, step) {
  const box = make("span", "looked");
  if (step.sources.some((source) => source >= 0)) {
    const begin = lane.offset + step.first, query = lane.texts.slice(begin - step.match_len, begin).join("");
    box.append("found again: ", make("code", "", printable(query.slice(-36))));
    if (step.sources.some((source) => source < 0)) box.append(` and guessed by ${guessers(step)}`);
  } else if (step.drafts.length) {
    box.append(`guessed by ${guessers(step)}`);
  } else {
    box.append(step.reason === "no match" ? "nothing like it before" : REASONS[step.reason]);
  }
  return box;
}

function whyBriefly(step) {
  const box = make("span", "why");
  if (!step.drafts.length) return box;
  box.append(`K ${step.verified}, ${REASONS[step.reason] ?? `promised ${few(step.promised)} ×`}`);
  box.title = why(step);
  return box;
}

/** A bar of all stages but the prompt, so many pixels to a ms, or as wide as it may be. */
function stageBar(step, perMs = 0) {
  const bar = make("span", "stages");
  for (const [stage, ms] of Object.entries(step.ms)) {
    if ((perMs && stage === "prefill") || ms <= 0) continue;
    const part = make("i", `s-${stage}`);
    part.style[perMs ? "width" : "flexGrow"] = perMs ? `${ms * perMs}px` : ms;
    bar.append(part);
  }
  return bar;
}

/** What happened in a step, in words. */
function story(lane, step) {
  const n = step.accepted.length, word = step.own === null ? "" : tokenText(step.own);
  const own = word && `“${word.trim() || word}”`;
  const gave = `So this run of the model gave ${count(step.tokens.length, "token")} instead of 1.`;
  if (!step.drafts.length) return `${NOTHING[step.reason] ?? NOTHING["no match"]} The model wrote one token itself: ${own}.`;
  const copied = step.sources.filter((source) => source >= 0).length, others = step.drafts.length - copied;
  let words = copied
    ? `The last ${step.match_len === 1 ? "token" : `${step.match_len} tokens`} had occurred before, and what ` +
      `followed there was taken as ${others ? "a" : "the"} guess: ${count(copied, "token")}.`
    : "";
  if (others) words += ` ${count(others, "token")} ${others === 1 ? "was" : "were"} guessed by ${guessers(step)}.`;
  words = words.trim();
  if (!isChain(step)) words += " They branch: it is a tree of continuations.";
  if (!step.verified) return `${words} Checking them did not promise to pay, so the model wrote one token: ${own}.`;
  if (step.verified < step.drafts.length) words += ` The first ${step.verified} were checked.`;
  if (own && n === 0) return `${words} The model saw it otherwise and wrote ${own}; the guesses were thrown away.`;
  const right = isChain(step) ? (n === 1 ? "The first one was" : `The first ${n} were`) : n === 1 ? "One was" : `${n}, one behind the other, were`;
  if (own && n < step.verified) return `${words} ${right} what the model would have written; then it wrote ${own} itself. ${gave}`;
  if (own) return `${words} All were what the model would have written, and ${own} it added itself. ${gave}`;
  return `${words} ${n === 1 ? "One was" : `${n} were`} what the model would have written; there the output ends. ${gave}`;
}

const NOTHING = {
  off: "Nobody was asked to guess.",
  end: "Only one token was left to write, so nothing was guessed.",
  "no match": "Nobody had a guess: nothing like the last token had occurred before.",
  "does not pay": "Guessing did not promise to pay.",
};

/** Why so many guesses were checked, in words. */
function why(step) {
  if (!step.drafts.length || !step.verified) return "";
  if (step.reason === "fixed") return `K is fixed: all ${step.verified} guesses are checked.`;
  if (step.reason === "probe") return "Checked only to learn whether guesses have become better: a probe.";
  return `The step promised ${few(step.promised)} times the tokens per ms of one without guesses.`;
}

/** What is shown of the selected step beside its row. */
function drawDetail(lane, step) {
  const bars = make("div", "bars", stageBar(step));
  for (const [stage, ms] of Object.entries(step.ms)) {
    if (ms >= 0.05) bars.append(make("b", "", make("i", `s-${stage}`), `${STAGES[stage] ?? stage} ${few(ms)} ms`));
  }
  const shared = step.batch > 1 ? ` This step was shared by ${step.batch} requests.` : "";
  return make("div", "detail", make("p", "story", `${story(lane, step)}${shared} ${why(step)}`.trim()), bars);
}
