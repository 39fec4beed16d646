// An answer on the page: a span for each token inside a span for its step, drawn as tokens arrive.

import { count, few } from "./run.js";

const MOST_REJECTED = 3; // rejected drafts shown per step; the others are counted

/** Create an element with a class and children (texts or elements). */
export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

export const button = (label, action) => {
  const element = make("button", "", label);
  element.type = "button";
  element.addEventListener("click", action);
  return element;
};

/** Replace control characters, except line breaks and tabs, with their symbols, one for one. */
export const printable = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (c) =>
  String.fromCharCode(c === "\u007f" ? 0x2421 : 0x2400 + c.charCodeAt(0)));
const inLine = (text) => printable(text.replace(/\n/g, "↵").replace(/\t/g, "⇥"));

export class Answer {
  #drawn = 0; // number of tokens
  #step = null; // the latest step: its number, its element, its rejected drafts

  constructor(run) {
    const { title } = run;
    this.run = run;
    this.spans = []; // by output token
    this.places = new Map(); // span -> token
    this.text = make("div", "text");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", `${title}. Arrow keys move between tokens.`);
    this.note = make("p", "note small");
    this.element = make("section", `run ${run.isPlain ? "plain" : ""}`, make("h3", "small", title), this.text, this.note);
    this.element.setAttribute("aria-label", title);
  }

  /** Draw the tokens that have arrived since the last call. */
  draw() {
    const { tokens } = this.run;
    for (; this.#drawn < tokens.length; this.#drawn++) this.#add(tokens[this.#drawn]);
    const { tokens: n, steps, rate } = this.run.figures;
    const cut = this.run.finish === "length" ? " · reached max tokens" : "";
    this.note.textContent = n ? `${count(n, "token")} in ${count(steps, "step")} · ${few(rate)} tokens/s${cut}` : "";
  }

  #add(token) {
    if (this.#step?.number !== token.step) {
      this.#step = { number: token.step, element: make("span", "step"), rejected: 0, more: null };
      this.text.append(this.#step.element);
    }
    const { element } = this.#step;
    if (token.kind === "rejected" && ++this.#step.rejected > MOST_REJECTED) {
      this.#step.more ??= element.appendChild(make("span", "t rejected more"));
      this.#step.more.textContent = `+${this.#step.rejected - MOST_REJECTED}`;
      return;
    }
    const span = make("span", `t ${token.kind}`, (token.kind === "rejected" ? inLine : printable)(token.text));
    element.append(span);
    this.places.set(span, token);
    if (token.kind === "rejected") span.setAttribute("aria-hidden", "true");
    else {
      this.spans.push(span);
      element.classList.toggle("many", this.run.steps[token.step].tokens > 1);
    }
  }

  /** Describe a token. */
  tip(span) {
    const token = this.places.get(span), step = this.run.steps[token.step];
    const by = token.drafter ? ` (${token.drafter})` : "";
    const origin = {
      own: "the model's own token", copied: `accepted draft, copied from token ${token.source + 1}${by}`,
      generated: `accepted draft${by}`, rejected: "rejected draft",
    }[token.kind];
    const accepted = step.drafted ? `, ${step.accepted} of ${count(step.drafted, "draft")} accepted` : "";
    return `${origin}; step ${token.step + 1}: ${count(step.tokens, "token")}${accepted}`;
  }

  /** The visible span that is `by` spans away from this one, or the first one. */
  next(span, by) {
    const all = [...this.places.keys()].filter((other) => other.offsetParent), at = all.indexOf(span);
    return all[at < 0 ? 0 : Math.min(Math.max(at + by, 0), all.length - 1)];
  }

  /** First and last source of the consecutive tokens that one step copied together with this token. */
  stretch(token) {
    const { tokens } = this.run, at = tokens.indexOf(token);
    const together = (a, b) => tokens[b]?.step === token.step && tokens[b].kind === "copied"
      && tokens[b].source - tokens[a].source === b - a;
    let from = at, to = at;
    while (together(from, from - 1)) from--;
    while (together(to, to + 1)) to++;
    return [tokens[from].source, tokens[to].source];
  }
}
