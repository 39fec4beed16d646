// The conversation. A turn is what the user said, its answer, the same answer again, or what went wrong.

import { button, make, printable } from "./answer.js";
import { few } from "./run.js";

export const state = {
  model: null, // as `/v1/models` tells of it
  key: "", // for the server
  turns: [],
  abort: null, // ends the answer under way
  afterKey: null, // what to try again when there is a key
};

export class Turn {
  constructor(content) {
    this.content = content;
    this.answers = [];
    this.said = make("div", "said", printable(content));
    this.runs = make("div", "runs");
    this.after = make("div", "after");
    this.element = make("li", "turn", make("h3", "hidden", "You"), this.said, this.runs, this.after);
  }

  /** The text that the conversation goes on from, or "" if there is none. */
  get text() {
    return this.answers[0]?.run.text ?? "";
  }

  add(answer) {
    this.answers.push(answer);
    this.runs.append(answer.element);
    this.after.replaceChildren();
  }

  /** Forget the answers from the nth on. */
  forget(n) {
    this.answers.splice(n).forEach((answer) => answer.element.remove());
    this.after.replaceChildren();
  }

  fail(words, retry) {
    const sentence = make("p", "error", words);
    sentence.setAttribute("role", "alert");
    this.after.replaceChildren(sentence, make("div", "actions", button("Try again", retry)));
  }

  offerAgain(words, again) {
    this.after.replaceChildren(make("div", "actions", button(words, again)));
  }

  /** Both speeds, and whether the texts are equal; gives the sentence. */
  compare() {
    const [first, second] = this.answers.map((answer) => answer.run);
    const rates = [first, second].map((run) => run.figures.rate), most = Math.max(...rates);
    const tracks = this.answers.map((answer, i) => {
      const bar = make("i", answer.run.isPlain ? "plain" : "");
      bar.style.width = `${most ? (100 * rates[i]) / most : 0}%`;
      const rate = make("span", "rate", `${few(rates[i])} tokens/s`);
      return make("div", "track", make("span", "who", answer.run.title), make("span", "bar", bar), rate);
    });
    const [fast, slow] = first.isPlain ? [rates[1], rates[0]] : rates;
    const speed = slow && fast ? `${few(fast / slow)} × as fast with guesses.` : "Too few tokens to compare speeds.";
    const words = `${speed} ${sameness(first.text, second.text)}`;
    this.after.replaceChildren(make("div", "verdict", ...tracks, make("p", "", words)));
    return words;
  }
}

function sameness(a, b) {
  if (a === b) return "The texts are equal.";
  let at = 0;
  while (a[at] === b[at]) at++;
  return `The texts differ from character ${at + 1} on.`;
}
