// The race: an animation of the tokens generated over time, with and without speculation.

let race = null; // {lane, tracks, end, time, frame}

/** Return the number of tokens generated `time` seconds after the request's arrival. */
function tokensWithDrafts(lane, time) {
  let low = 0, high = lane.steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.steps[middle].at <= time + 1e-9) low = middle + 1;
    else high = middle;
  }
  return low ? lane.steps[low - 1].first + lane.steps[low - 1].tokens.length : 0;
}

function tokensWithoutDrafts(lane, time) {
  const n = lane.token_ids.length, first = lane.first_token_seconds, all = lane.plain_seconds;
  if (time < first) return 0;
  return n < 2 || time >= all ? n : Math.floor(1 + ((time - first) / (all - first)) * (n - 1));
}

function drawRace(lane) {
  stopRace();
  const isRaced = lane.plain_seconds !== null && lane.token_ids.length > 1;
  const tracks = [{ name: "with speculation", written: tokensWithDrafts, end: lane.seconds, fast: true }];
  if (isRaced) tracks.unshift({ name: "without speculation", written: tokensWithoutDrafts, end: lane.plain_seconds });
  for (const track of tracks) {
    track.canvas = make("canvas");
    track.count = make("span", "count");
    track.row = make("div", "track", make("span", "label", track.name), make("div", "bar", track.canvas), track.count);
  }
  $("tracks").replaceChildren(...tracks.map((track) => track.row));
  race = { lane, tracks, end: Math.max(...tracks.map((track) => track.end)), time: lane.seconds, frame: 0 };
  $("race").hidden = !lane.hasDrafts;
  $("race-note").textContent = isRaced ? raceNote(lane) : "The time without speculation is unknown.";
  drawTracks();
}

function raceNote(lane) {
  const factor = lane.plain_seconds / lane.seconds, plain = tokensWithoutDrafts(lane, lane.seconds);
  const how = "The time without speculation is estimated from the time of each step and the measured cost of steps without drafts.";
  if (factor < 0.975) return `${few(1 / factor, 2)}× slower than without speculation. ${how}`;
  if (factor < 1.025) return `As fast as without speculation. ${how}`;
  return `${few(factor, factor < 2 ? 2 : 1)}× faster: decoding without speculation generates ${plain} of the ${lane.token_ids.length} tokens in the same time. ${how}`;
}

function drawTracks() {
  const { lane, tracks, time } = race, n = lane.token_ids.length;
  const style = getComputedStyle(document.documentElement);
  for (const track of tracks) {
    const written = track.written(lane, time), { canvas } = track;
    const width = (canvas.width = Math.max(canvas.clientWidth * devicePixelRatio, 1));
    const height = (canvas.height = Math.max(canvas.clientHeight * devicePixelRatio, 1));
    const pen = canvas.getContext("2d");
    pen.fillStyle = style.getPropertyValue(track.fast ? "--accent" : "--faint");
    pen.fillRect(0, 0, (written / n) * width, height);
    pen.fillStyle = style.getPropertyValue("--paper");
    const ends = track.fast ? lane.steps.map((step) => step.first) : [...Array(n).keys()];
    if (width / ends.length > 3 * devicePixelRatio) {
      for (const at of ends) if (at > 0 && at < written) pen.fillRect((at / n) * width - 0.5, 0, devicePixelRatio, height);
    }
    const done = written === n;
    track.count.replaceChildren(make("b", "", done ? seconds(track.end) : `${written} of ${n}`), done ? `, all ${n} tokens` : " tokens");
  }
}

/** Play the race from the start, in 3 to 9 seconds. `onTime` is called with the time of each frame. */
function playRace(onTime) {
  if (!race) return;
  if (race.frame) return stopRace(true);
  const shown = Math.min(Math.max(race.end, 3), 9), started = performance.now();
  $("replay").firstElementChild.textContent = "■";
  const tick = (now) => {
    race.time = Math.min(((now - started) / 1000) * (race.end / shown), race.end);
    drawTracks();
    onTime(race.time);
    if (race.time < race.end) race.frame = requestAnimationFrame(tick);
    else stopRace();
  };
  race.frame = requestAnimationFrame(tick);
}

/** Stop the race; if `whole`, show the state at the end of the output. */
function stopRace(whole = false) {
  if (!race) return;
  cancelAnimationFrame(race.frame);
  race.frame = 0;
  $("replay").firstElementChild.textContent = "▶";
  revealUpTo(spans.length);
  if (whole) {
    race.time = race.lane.seconds;
    drawTracks();
  }
}
