// Shows where a token was copied from: this answer, or the prompt, which is the conversation before it.

import { ask } from "./stream.js";

/** Highlight tokens from..to of prompt and output. `messages` are {content, element} in the prompt's order. */
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

/** The prompt after the chat template, as tokens and text; null if the server did not return it. */
async function promptOf(run, key) {
  try {
    const body = { model: run.request.model, messages: run.request.messages };
    const { tokens } = await (await ask("tokenize", { body, key })).json();
    const same = !run.usage || run.usage.prompt_tokens === tokens.length;
    return same ? { tokens, text: await textOf(tokens, key) } : null;
  } catch {
    return null; // origins are optional
  }
}

async function textOf(tokens, key) {
  if (!tokens.length) return "";
  return (await (await ask("detokenize", { body: { tokens }, key })).json()).prompt;
}

/** Highlight characters start..end of the prompt's text in the message that contains them. */
function highlight(messages, text, start, end) {
  let next = 0;
  for (const { content, element } of messages) {
    const at = content ? text.indexOf(content, next) : -1;
    if (at < 0) continue;
    next = at + content.length;
    if (!element || start >= next || end <= at) continue;
    const range = rangeIn(element, Math.max(start, at) - at, Math.min(end, next) - at);
    if (range) CSS.highlights?.set("source", new Highlight(range));
  }
}

/** A Range of characters start..end of an element's text, not counting rejected drafts. */
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
