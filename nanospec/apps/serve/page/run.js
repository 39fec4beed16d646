// One answer as data: its tokens, its steps, and their statistics.

/** A token is {text, kind, source, step}; kind is "own", "copied" or "generated" (accepted drafts), or "rejected". */
export class Run {
  constructor(request) {
    this.request = request; // what was sent
    this.isPlain = request.num_speculative_tokens === 0;
    this.title = this.isPlain ? "Without speculation" : "With speculation";
    this.tokens = []; // rejected drafts come before the token that replaced them
    this.steps = []; // {tokens: count, drafted, accepted}, the last two only if a chunk holds a single step
    this.text = "";
    this.drafted = this.accepted = 0;
    this.usage = this.finish = null;
    this.started = performance.now();
    this.open = false; // whether the last step may get more tokens
  }

  /** Add a chunk of the stream. */
  take(chunk, now = performance.now()) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    const text = choice?.delta?.content;
    if (!text) return;
    const about = chunk.speculation ?? {};
    const whole = about.pieces?.map(([piece]) => piece).join("") === text;
    const pieces = whole ? about.pieces : [[text, -1]];
    this.text += text;
    this.drafted += about.drafted ?? 0;
    this.accepted += about.accepted ?? 0;
    const before = this.steps.length;
    this.#add(pieces, about.rejected ?? [], about.drafter);
    const { drafted, accepted } = about;
    if (this.steps.length === before + 1) Object.assign(this.steps.at(-1), { drafted, accepted });
    if (this.first === undefined) Object.assign(this, { first: now, atFirst: this.count });
    this.last = now;
  }

  /** Add the tokens of one or more steps. A step is accepted drafts followed by one token of the model's own. */
  #add(pieces, rejected, drafter) {
    const lastOwn = pieces.findLastIndex(([, source]) => source === -1);
    pieces.forEach(([text, source], i) => {
      if (!this.open) this.steps.push({ tokens: 0 });
      const step = this.steps.length - 1;
      if (i === lastOwn) this.#reject(rejected, step);
      const kind = source >= 0 ? "copied" : source === -1 ? "own" : "generated";
      this.tokens.push({ text, source, step, drafter, kind });
      this.steps[step].tokens++;
      this.open = source !== -1;
    });
    if (lastOwn < 0) this.#reject(rejected, this.steps.length - 1);
  }

  #reject(texts, step) {
    for (const text of texts) this.tokens.push({ text, source: null, step, kind: "rejected" });
  }

  get count() {
    return this.steps.reduce((total, step) => total + step.tokens, 0);
  }

  /** Current statistics, the server's own once available. Tokens per second are measured from the first chunk. */
  get figures() {
    const server = this.usage?.speculation ?? {}, seen = this.count;
    const tokens = this.usage?.completion_tokens ?? seen, steps = server.num_steps ?? this.steps.length;
    const drafted = server.num_drafted ?? this.drafted, accepted = server.num_accepted ?? this.accepted;
    const took = (this.last - this.first) / 1000;
    return {
      tokens, steps, drafted, accepted, rejected: drafted - accepted, own: Math.max(tokens - accepted, 0),
      perStep: server.tokens_per_step ?? (steps ? tokens / steps : null),
      acceptance: drafted ? accepted / drafted : null,
      rate: took > 0 ? (seen - this.atFirst) / took : null,
      first: this.first === undefined ? null : (this.first - this.started) / 1000,
    };
  }
}

export const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
export const few = (x) => (x === null ? "–" : x.toFixed(x >= 100 ? 0 : 1));
export const seconds = (s) => (s === null ? "–" : s < 1 ? `${Math.round(1000 * s)} ms` : `${few(s)} s`);
