// The arrow from a draft to its source in the text, and the tooltip of the draft.

let pointed = null; // {element, from}: the element of the draft and that of its source

/** Show a draft's tooltip and the arrow from `element` to the draft's source. */
function pointAt(lane, step, place, element) {
  stopPointing();
  const source = step.sources[place - 1], from = source >= 0 ? spans[source] : null;
  element.classList.add("pointed");
  pointed = { element, from };
  if (from) {
    showToken(source);
    mark(source, source + 1, "source");
  }
  $("tip").replaceChildren(...tipFor(lane, step, place));
  $("tip").hidden = false;
  redraw();
}

function tipFor(lane, step, place) {
  const source = step.sources[place - 1], text = tokenText(step.drafts[place - 1]);
  const verdict = step.accepted.includes(place) ? "accepted" : place <= step.verified ? "rejected" : "not verified";
  if (source < 0) return [make("code", "", text), ` ${originOf(step, place)}; ${verdict}`];
  const begin = Math.max(source - 6, 0), near = lane.texts.slice(begin, source).join("");
  return [
    make("code", "", text), ` copied from token ${source + 1}, after `,
    make("code", "", `…${printable(near.slice(-28))}`), `; ${verdict}`,
  ];
}

/** Place the tooltip above the element, or below it where there is no space. */
function placeTip(element) {
  const tip = $("tip"), box = element.getBoundingClientRect(), width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = `${Math.max(8, Math.min(box.right, innerWidth - width - 8))}px`;
  tip.style.top = `${box.top < height + 16 ? box.bottom + 8 : box.top - height - 8}px`;
}

function stopPointing() {
  if (!pointed) return;
  pointed.element.classList.remove("pointed");
  if (pointed.from) pointed.from.classList.remove("source");
  pointed = null;
  $("tip").hidden = true;
  $("arrows").classList.remove("on");
}

function redraw() {
  const arrows = $("arrows");
  if (pointed) placeTip(pointed.element);
  arrows.classList.toggle("on", Boolean(pointed?.from));
  if (!pointed?.from) return;
  const a = pointed.element.getBoundingClientRect(), b = pointed.from.getClientRects()[0] ?? pointed.from.getBoundingClientRect();
  const start = [a.left + a.width / 2, a.top < b.top ? a.bottom : a.top], end = [b.right, b.top + b.height / 2];
  const isNear = Math.abs(start[0] - end[0]) < 160, bend = Math.max(60, Math.abs(start[0] - end[0]) / 2);
  const path = isNear
    ? `M${start} C${start[0]},${(start[1] + end[1]) / 2} ${end[0] + 90},${end[1]} ${end}`
    : `M${start} C${start[0]},${start[1] - 40} ${end[0] + bend},${end[1]} ${end}`;
  $("arrow").setAttribute("d", path);
  $("arrow-halo").setAttribute("d", path);
  $("arrow-end").setAttribute("cx", end[0]);
  $("arrow-end").setAttribute("cy", end[1]);
}
