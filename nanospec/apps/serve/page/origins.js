// Where a copied token was copied from: in this answer, or in the prompt, that is, in the conversation before it.

import { ask } from "./stream.js";

/** Point at the tokens from..to of prompt and output; `messages` are {content, element} in the prompt's order. */
export async function showOrigin(answer, [from, to], messages, key, isCurrent) {
  const prompt = await (answer.prompt ??= promptOf(answer.run, key));
  if (!prompt || !isCurrent()) return;
  const inPrompt = prompt.tokens.length;
  const sources = answer.spans.slice(Math.max(from - inPrompt, 0), Math.max(to + 1 - inPrompt, 0));
  for (const span of sources) span.classList.add("source");
  if (from >= inPrompt) return;
  const texts = await Promise.all([from, to + 1].map((n) => textOf(prompt.tokens.slice(0, n), key)));
  if (isCurrent()) highlight(messages, prompt.text, ...texts.map((text) => text.length));
}

export function hideOrigin() {
  document.querySelectorAll(".t.source").forEach((span) => span.classList.remove("source"));
  CSS.highlights?.delete("source");
}

/** The prompt as the model saw it, as tokens and as text; null if the server does not say. */
async function promptOf(run, key) {
  try {
    const body = { model: run.request.model, messages: run.request.messages };
    const { tokens } = await (await ask("tokenize", { body, key })).json();
    const same = !run.usage || run.usage.prompt_tokens === tokens.length;
    return same ? { tokens, text: await textOf(tokens, key) } : null;
  } catch {
    return null; // the answer shows as well without
  }
}

async function textOf(tokens, key) {
  if (!tokens.length) return "";
  return (await (await ask("detokenize", { body: { tokens }, key })).json()).prompt;
}

/** Mark start..end of the prompt's text in the message that it lies in. */
function highlight(messages, text, start, end) {
  let behind = 0;
  for (const { content, element } of messages) {
    const at = content ? text.indexOf(content, behind) : -1;
    if (at < 0) continue;
    behind = at + content.length;
    if (!element || start >= behind || end <= at) continue;
    const range = rangeIn(element, Math.max(start, at) - at, Math.min(end, behind) - at);
    if (range) CSS.highlights?.set("source", new Highlight(range));
  }
}

/** Characters start..end of an element's text, without rejected guesses. */
function rangeIn(element, start, end) {
  const range = document.createRange(), walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  let at = 0, begun = false;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.parentElement.classList.contains("rejected")) continue;
    const length = node.data.length;
    if (!begun && start < at + length) {
      range.setStart(node, start - at);
      begun = true;
    }
    if (begun && end <= at + length) {
      range.setEnd(node, end - at);
      return range;
    }
    at += length;
  }
  return null;
}
