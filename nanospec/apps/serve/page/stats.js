// The statistics next to the conversation: those of one answer, updated while it streams.

import { count, few, seconds } from "./run.js";

const $ = (id) => document.getElementById(id);
const MOST_STEPS = 96; // shown in the chart, the latest ones

let shown = null, waiting = false;

/** Show a run's statistics at the next animation frame. */
export function showFigures(run) {
  shown = run;
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    draw(shown);
  });
}

function draw(run) {
  const f = run?.figures;
  $("rate").textContent = f ? few(f.rate) : "–";
  $("first").textContent = f ? seconds(f.first) : "–";
  $("per-step").textContent = f ? few(f.perStep) : "–";
  $("acceptance").textContent = f && f.acceptance !== null ? `${Math.round(100 * f.acceptance)} %` : "–";
  const parts = f ? { accepted: f.accepted, own: f.own, rejected: f.rejected } : { accepted: 0, own: 0, rejected: 0 };
  for (const [name, n] of Object.entries(parts)) $("shares").querySelector(`.${name}`).style.flexGrow = n;
  const text = f && f.tokens
    ? `${count(f.accepted, "draft")} accepted, ${f.rejected} rejected; ${count(f.own, "token")} from the model.`
    : "No tokens yet.";
  $("counts").textContent = text;
  $("shares").setAttribute("aria-label", text);
  drawSteps(run?.steps ?? []);
}

function drawSteps(all) {
  const steps = all.slice(-MOST_STEPS), max = Math.max(4, ...steps.map((step) => step.tokens));
  const wide = Math.max(steps.length, 32);
  $("spark").setAttribute("viewBox", `0 0 ${wide} ${max}`);
  $("spark").replaceChildren(...steps.map(({ tokens }, i) => {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const place = { x: i + 0.1, y: max - tokens, width: 0.8, height: tokens };
    for (const [name, value] of Object.entries(place)) bar.setAttribute(name, value);
    bar.setAttribute("class", tokens > 1 ? "many" : "one");
    return bar;
  }));
  const which = all.length > MOST_STEPS ? `the last ${MOST_STEPS} steps` : "each step";
  const text = `Tokens in ${which}${all.length ? `, up to ${Math.max(...steps.map((step) => step.tokens))}` : ""}`;
  $("spark-note").textContent = text;
  $("spark").setAttribute("aria-label", text);
}
