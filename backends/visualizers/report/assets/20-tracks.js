// The tracks of the timeline as typed arrays: events of a row lie in order and do not overlap, so that a place is found
// by halving.
function decode(track, subject, number) {
  const count = track.start.length;
  const made = {
    title: data.subjects.length > 1 ? (subject.tracks.length > 1 ? `${subject.short}, ${track.title}` : subject.short) : track.title,
    kind: track.title,
    note: track.note,
    subject,
    number,
    rows: track.rows,
    ends: track.ends,
    firstStep: track.first_step,
    warmUp: track.warm_up,
    offset: 0,
    last: track.last,
    start: new Float64Array(count),
    length: Float64Array.from(track.length),
    row: Int32Array.from(track.row),
    label: Int32Array.from(track.label),
    step: Int32Array.from(track.step),
    version: Int32Array.from(track.version),
    age: Int32Array.from(track.age),
  };
  let time = 0;
  for (let at = 0; at < count; at += 1) made.start[at] = time += track.start[at];
  made.events = grouped(made.row, track.rows.length);
  made.idle = { start: Float64Array.from(track.idle.start), length: Float64Array.from(track.idle.length) };
  made.idleOf = grouped(Int32Array.from(track.idle.row), track.rows.length);
  return made;
}

function grouped(rows, count) {
  const sizes = new Int32Array(count);
  for (const row of rows) sizes[row] += 1;
  const found = [...sizes].map((size) => new Int32Array(size));
  sizes.fill(0);
  rows.forEach((row, at) => (found[row][sizes[row]++] = at));
  return found;
}

// The number of the first entry of `own` whose end is at or after `time`.
function firstAfter(own, start, length, time) {
  let low = 0;
  let high = own.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[own[middle]] + length[own[middle]] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

const tracks = data.subjects.flatMap((subject) => subject.tracks.map((track, at) => decode(track, subject, at)));
report.tracks = tracks;

// Steps of a track: its number, and when it began and ended.
function stepsOf(track) {
  return track.ends.map((end, at) => ({ step: track.firstStep + at, from: at ? track.ends[at - 1] : 0, to: end }));
}

// Lays measured tracks beside the simulated one of their subject: the given step begins at the same time in both.
function align(step) {
  for (const subject of data.subjects) {
    const own = tracks.filter((track) => track.subject === subject);
    if (own.length < 2) continue;
    const [planned, measured] = own;
    const there = stepsOf(planned).find((found) => found.step === step);
    const here = stepsOf(measured).find((found) => found.step === step);
    if (there && here) measured.offset = there.from - here.from;
  }
  setLast();
}

function setLast() {
  axis.last = Math.max(1, ...tracks.map((track) => track.last + Math.max(0, track.offset)));
}

function agesOf(subject, label, step) {
  const found = subject.ages.find((entry) => entry.stage === label.stage && entry.track === "simulated");
  const own = found && found.steps.find(([at]) => at === step);
  if (!own) return "";
  const total = own[1].reduce((sum, [, count]) => sum + count, 0);
  return own[1].map(([age, count]) => `${age}: ${Math.round((100 * count) / total)} %`).join(", ");
}

// What is to be said about an event, a line each.
function describe(track, at) {
  const label = track.subject.labels[track.label[at]];
  const row = track.rows[track.row[at]];
  const lines = [`${label.text}, step ${track.step[at]}${label.phase ? ` (evaluation ${label.phase})` : ""}`];
  lines.push(`${track.title}: pool ${row.pool}, rank ${row.rank}`);
  lines.push(`${seconds(track.length[at])}, from ${seconds(track.start[at])} to ${seconds(track.start[at] + track.length[at])}`);
  if (track.version[at] >= 0) lines.push(`weights of version ${track.version[at]}`);
  const ages = track.kind === "simulated" && label.kind === "run" ? agesOf(track.subject, label, track.step[at]) : "";
  if (ages) lines.push(`ages of its samples in steps: ${ages}`);
  else if (track.age[at] >= 0) lines.push(`age of what it makes: ${track.age[at]} step${track.age[at] === 1 ? "" : "s"}`);
  if (label.waits && track.length[at] > 0) lines.push("waits: the devices do nothing for it");
  if (label.cycle) lines.push("on the cycle that sets the time of a step");
  if (label.place) lines.push(`written at ${label.place}${label.inserted ? `, put in by ${label.inserted}` : ""}`);
  return lines.join("\n");
}
