// The timeline of several requests: one line per request, one block per step.

function drawLanes(select) {
  const { lanes } = trace;
  if (lanes.length < 2) return;
  $("lanes").hidden = $("lane-keys").hidden = false;
  const items = lanes.map((lane, i) => {
    lane.canvas = make("canvas");
    lane.button = make(
      "button", "lane",
      make("span", "name", /^request-\d+$/.test(lane.name) ? lane.excerpt || lane.name : lane.name), lane.canvas,
      make("span", "figure", `${count(lane.token_ids.length, "token")} in ${count(lane.steps.length, "step")}`),
    );
    lane.button.type = "button";
    lane.button.title = lane.excerpt;
    lane.button.addEventListener("click", () => select(i));
    return make("li", "", lane.button);
  });
  $("lane-list").replaceChildren(...items);
  if (trace.num_omitted) {
    $("omitted").textContent = `Showing the latest ${lanes.length} requests; ` +
      `${count(trace.num_omitted, "earlier request")} omitted.`;
  }
  paintLanes();
}

/** Paint the blocks. The more drafts a step accepted, the stronger its colour. */
function paintLanes() {
  const { lanes } = trace;
  if (lanes.length < 2) return;
  const style = getComputedStyle(document.documentElement);
  const end = Math.max(...lanes.map((lane) => lane.start + lane.seconds), 1e-9);
  for (const lane of lanes) {
    const width = (lane.canvas.width = Math.max(lane.canvas.clientWidth * devicePixelRatio, 1));
    const height = (lane.canvas.height = Math.max(lane.canvas.clientHeight * devicePixelRatio, 1));
    const pen = lane.canvas.getContext("2d"), scale = width / end;
    pen.fillStyle = style.getPropertyValue("--rule");
    pen.fillRect(0, height / 2 - 0.5, width, 1);
    for (const step of lane.steps) {
      const x = (lane.start + step.at) * scale, took = Math.max((step.total / 1000) * scale, 1);
      const n = step.accepted.length;
      pen.globalAlpha = n ? Math.min(0.35 + n / 10, 1) : 1;
      pen.fillStyle = style.getPropertyValue(n ? "--accent" : "--faint");
      pen.fillRect(x - took, 0, Math.max(took - (took > 3 ? 1 : 0), 1), height);
    }
    pen.globalAlpha = 1;
  }
}
