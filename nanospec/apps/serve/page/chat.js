// The conversation. A turn is a user message, its answer, and the repeated answer or an error.

import { button, make, printable } from "./answer.js";
import { few } from "./run.js";

export const state = {
  model: null, // its entry in `/v1/models`
  key: "", // API key of the server
  turns: [],
  abort: null, // aborts the running answer
  afterKey: null, // what to retry once there is a key
};

export class Turn {
  constructor(content) {
    this.content = content;
    this.answers = [];
    this.message = make("div", "message", printable(content));
    this.runs = make("div", "runs");
    this.after = make("div", "after");
    this.element = make("li", "turn", make("h3", "hidden", "You"), this.message, this.runs, this.after);
  }

  /** The answer with which the conversation continues, or "" if there is none. */
  get text() {
    return this.answers[0]?.run.text ?? "";
  }

  add(answer) {
    this.answers.push(answer);
    this.runs.append(answer.element);
    this.after.replaceChildren();
  }

  /** Remove the answers from the nth on. */
  forget(n) {
    this.answers.splice(n).forEach((answer) => answer.element.remove());
    this.after.replaceChildren();
  }

  fail(message, retry) {
    const paragraph = make("p", "error", message);
    paragraph.setAttribute("role", "alert");
    this.after.replaceChildren(paragraph, make("div", "actions", button("Try again", retry)));
  }

  offerAgain(label, again) {
    this.after.replaceChildren(make("div", "actions", button(label, again)));
  }

  /** Show both speeds and whether the texts are identical. Return that as a sentence. */
  compare() {
    const [first, second] = this.answers.map((answer) => answer.run);
    const rates = [first, second].map((run) => run.figures.rate), max = Math.max(...rates);
    const tracks = this.answers.map((answer, i) => {
      const bar = make("i", answer.run.isPlain ? "plain" : "");
      bar.style.width = `${max ? (100 * rates[i]) / max : 0}%`;
      const rate = make("span", "rate", `${few(rates[i])} tokens/s`);
      return make("div", "track", make("span", "name", answer.run.title), make("span", "bar", bar), rate);
    });
    const [fast, slow] = first.isPlain ? [rates[1], rates[0]] : rates;
    const speed = slow && fast ? `${few(fast / slow)} × as fast with speculation.` : "Too few tokens to compare speeds.";
    const text = `${speed} ${sameness(first.text, second.text)}`;
    this.after.replaceChildren(make("div", "verdict", ...tracks, make("p", "", text)));
    return text;
  }
}

function sameness(a, b) {
  if (a === b) return "The texts are identical.";
  let at = 0;
  while (a[at] === b[at]) at++;
  return `The texts first differ at character ${at + 1}.`;
}
