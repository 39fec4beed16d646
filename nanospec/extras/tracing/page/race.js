// One token at a time against guessing: who has written how much by when.

let race = null; // {lane, end, tracks, time, frame, started}

/** How many tokens are there after so many seconds: with guesses, and without. */
function writtenWithGuesses(lane, time) {
  let low = 0, high = lane.steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.steps[middle].at <= time + 1e-9) low = middle + 1;
    else high = middle;
  }
  return low ? lane.steps[low - 1].first + lane.steps[low - 1].tokens.length : 0;
}

function writtenPlainly(lane, time) {
  const n = lane.token_ids.length, first = lane.first_token_seconds, all = lane.plain_seconds;
  if (time < first) return 0;
  return n < 2 || time >= all ? n : Math.floor(1 + ((time - first) / (all - first)) * (n - 1));
}

function drawRace(lane) {
  stopRace();
  const isRaced = lane.plain_seconds !== null && lane.token_ids.length > 1;
  const tracks = [{ name: "with guesses", written: writtenWithGuesses, end: lane.seconds, fast: true }];
  if (isRaced) tracks.unshift({ name: "one at a time", written: writtenPlainly, end: lane.plain_seconds });
  for (const track of tracks) {
    track.canvas = make("canvas");
    track.count = make("span", "count");
    track.row = make("div", "track", make("span", "who", track.name), make("div", "bar", track.canvas), track.count);
  }
  $("tracks").replaceChildren(...tracks.map((track) => track.row));
  race = { lane, tracks, end: Math.max(...tracks.map((track) => track.end)), time: lane.seconds, frame: 0 };
  $("race").hidden = !lane.isGuessed;
  $("race-note").textContent = isRaced ? raceNote(lane) : "Nothing is known of the time without guesses.";
  drawTracks();
}

function raceNote(lane) {
  const factor = lane.plain_seconds / lane.seconds, by = writtenPlainly(lane, lane.seconds);
  const how = lane.plain_is_measured
    ? "Both were measured."
    : "The time one at a time is estimated, from each step's own time and what steps without guesses cost.";
  if (factor < 0.975) return `${few(1 / factor, 2)} × slower than one at a time. ${how}`;
  if (factor < 1.025) return `As fast as one at a time. ${how}`;
  return `${few(factor, factor < 2 ? 2 : 1)} × faster: when the last of ${lane.token_ids.length} tokens was there, one at a time had written ${by}. ${how}`;
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

/** Play the race from the beginning, in 3 to 9 seconds; the text appears beside it. */
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

/** Stop where it is; `whole`: and show how it ended. */
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
