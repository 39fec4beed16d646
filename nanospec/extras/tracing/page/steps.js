// The list of steps: one row per step with its n-gram match, drafts, K, tokens and time by stage.

const REASONS = { off: "speculation off", end: "last token", fixed: "fixed", "does not pay": "no speedup expected", pays: "speedup expected", probe: "probe" };

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
      make("span", "n", `${step.index + 1}`), describeDrafts(lane, step),
      shortReason(step),
      make("span", gain > 1 ? "gain" : "gain one", count(gain, "token")),
      make("span", "ms", stageBar(step, 58 / longest), `${few(step.total - (step.ms.prefill ?? 0))} ms`),
    ),
    drawDrafts(step),
  );
  return row;
}

/** Return the n-gram that was matched, or the names of the drafters. */
function describeDrafts(lane, step) {
  const box = make("span", "origin");
  if (step.sources.some((source) => source >= 0)) {
    const begin = lane.offset + step.first, query = lane.texts.slice(begin - step.match_len, begin).join("");
    box.append("n-gram match: ", make("code", "", printable(query.slice(-36))));
    if (step.sources.some((source) => source < 0)) box.append(`, then ${draftersOf(step)}`);
  } else if (step.drafts.length) {
    box.append(`drafted by ${draftersOf(step)}`);
  } else {
    box.append(REASONS[step.reason] ?? "no match");
  }
  return box;
}

function shortReason(step) {
  const box = make("span", "reason");
  if (!step.drafts.length) return box;
  box.append(`K = ${step.verified}, ${REASONS[step.reason]}`);
  box.title = reason(step);
  return box;
}

/** Return a bar of the stages: at `perMs` pixels per ms without prefill, or all stages at full width. */
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

/** Describe a step in words. */
function story(lane, step) {
  const n = step.accepted.length, word = step.sampled === null ? "" : tokenText(step.sampled);
  const sampled = word && `“${word.trim() || word}”`;
  const total = `One forward pass produced ${count(step.tokens.length, "token")}.`;
  if (!step.drafts.length) return `${NO_DRAFTS[step.reason] ?? NO_DRAFTS["no match"]} The model generated one token: ${sampled}.`;
  const copied = step.sources.filter((source) => source >= 0).length, others = step.drafts.length - copied;
  let words = copied
    ? `The last ${step.match_len === 1 ? "token occurs" : `${step.match_len} tokens occur`} earlier in the text. N-gram lookup ` +
      `drafted ${count(copied, "token")} that follow${copied === 1 ? "s" : ""} the match.`
    : "";
  if (others) words += ` ${count(others, "token")} ${others === 1 ? "was" : "were"} drafted by ${draftersOf(step)}.`;
  words = words.trim();
  if (!isChain(step)) words += " The drafts form a tree.";
  if (!step.verified) return `${words} Verifying them was not expected to save time, so the model generated one token: ${sampled}.`;
  if (step.verified < step.drafts.length) words += ` The first ${step.verified === 1 ? "one was" : `${step.verified} were`} verified.`;
  if (sampled && n === 0) return `${words} All were rejected; the model generated ${sampled} instead.`;
  const first = isChain(step) ? (n === 1 ? "The first draft was" : `The first ${n} drafts were`) : n === 1 ? "One draft was" : `A path of ${n} drafts was`;
  if (sampled && n < step.verified) return `${words} ${first} accepted; the model then generated ${sampled}. ${total}`;
  if (sampled) return `${words} All were accepted, and the model added ${sampled}. ${total}`;
  return `${words} ${n === 1 ? "One draft was" : `${n} drafts were`} accepted, and the output ends there. ${total}`;
}

const NO_DRAFTS = {
  off: "Speculation was disabled.",
  end: "Only one token was left to generate, so nothing was drafted.",
  "no match": "No drafter proposed a token (n-gram lookup needs an earlier occurrence of the last tokens).",
  "does not pay": "Drafts were not expected to save time.",
};

/** Explain the number of verified drafts. */
function reason(step) {
  if (!step.drafts.length || !step.verified) return "";
  if (step.reason === "fixed") return "K is fixed, so all drafts are verified.";
  if (step.reason === "probe") return "This step is a probe: it verified drafts only to update the acceptance rate.";
  return "The drafts that were expected to save time were verified.";
}

/** Return the details shown below the row of the selected step. */
function drawDetail(lane, step) {
  const bars = make("div", "bars", stageBar(step));
  for (const [stage, ms] of Object.entries(step.ms)) {
    if (ms >= 0.05) bars.append(make("b", "", make("i", `s-${stage}`), `${STAGES[stage] ?? stage} ${few(ms)} ms`));
  }
  const shared = step.batch > 1 ? ` The batch had ${step.batch} requests.` : "";
  return make("div", "detail", make("p", "story", `${story(lane, step)}${shared} ${reason(step)}`.trim()), bars);
}
