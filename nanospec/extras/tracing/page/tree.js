// The guesses of a step: a line of tokens, or a tree of them.

/** A token of a step: its guess at `place`, or the model's own at 0. */
function chip(step, place) {
  if (place === 0) {
    const own = make("span", "g own", tokenText(step.own));
    own.title = "the model's own token";
    return own;
  }
  const right = step.accepted.includes(place);
  const state = right ? kind(step, place) : place <= step.verified ? "rejected" : "unchecked";
  const found = make("span", `g ${state}`, tokenText(step.drafts[place - 1]));
  found.dataset.place = place;
  return found;
}

const isChain = (step) => step.parents.every((parent, i) => parent === i);
const drawGuesses = (step) => (isChain(step) ? drawChain(step) : drawTree(step));

/** What was kept first: the right guesses and the model's own token; behind it what was thrown away, most of
 * which is shown in the selected step only. */
function drawChain(step) {
  const box = make("div", "guesses");
  step.accepted.forEach((place) => box.append(chip(step, place)));
  if (step.own !== null) box.append(chip(step, 0));
  const rest = step.drafts.slice(step.accepted.length).map((_, i) => chip(step, step.accepted.length + 1 + i));
  const hidden = rest.slice(step.verified > step.accepted.length ? 3 : 0);
  hidden.forEach((element) => element.classList.add("rest"));
  box.append(...rest);
  if (hidden.length) box.append(make("span", "more", `+${hidden.length}`));
  return box;
}

/** Runs of tokens without a branch stand in a line; where it branches, one below the other. */
function drawTree(step) {
  const children = step.depths.map(() => []);
  step.parents.forEach((parent, i) => children[parent].push(i + 1));
  const last = step.accepted.at(-1) ?? 0;

  function branch(places) {
    const run = make("div", "run"), line = [run];
    let next = places;
    while (next.length === 1 && next[0] !== 0) {
      const place = next[0];
      run.append(chip(step, place));
      next = below(place);
    }
    if (next.length === 1) run.append(chip(step, 0));
    if (next.length > 1) line.push(make("div", "forks", ...next.map(fork)));
    return line;
  }
  function below(place) {
    const own = place === last && step.own !== null ? [0] : [];
    const right = children[place].filter((child) => step.accepted.includes(child));
    return [...right, ...own, ...children[place].filter((child) => !right.includes(child))];
  }
  function fork(place) {
    const isRight = place === 0 || step.accepted.includes(place);
    const box = make("div", isRight ? "fork right" : "fork");
    box.append(...(place === 0 ? [chip(step, 0)] : branch([place])));
    return box;
  }

  const first = below(0);
  const box = make("div", "guesses tree", make("span", "root"));
  if (first.length > 1) box.append(make("div", "forks", ...first.map(fork)));
  else box.append(make("div", "forks", fork(first[0])));
  return box;
}
