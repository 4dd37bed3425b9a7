// Charts below the bars, on the same time: memory of a device, batches in queues, ages of samples.
const strips = [];

class Strip {
  constructor(title, height, summary) {
    this.height = height;
    this.canvas = element("canvas", { role: "img", "aria-label": `${title}. ${summary}` });
    this.box = element("div", { class: "strip" }, element("h4", {}, title), this.canvas);
    byId("strips").append(this.box);
    movable(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => {
      axis.cursor = event.offsetX >= axis.left ? axis.time(event.offsetX) : null;
      axis.draw();
      showTip(event.buttons || event.offsetX < axis.left ? "" : this.describe(axis.time(event.offsetX)), event);
    });
    strips.push(this);
    axis.charts.push(this);
  }

  draw() {
    const pen = sized(this.canvas, this.height);
    pen.fillStyle = theme.paper;
    pen.fillRect(0, 0, axis.width, this.height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.save();
    pen.beginPath();
    pen.rect(axis.left, 0, axis.width - axis.left, this.height);
    pen.clip();
    this.fill(pen);
    if (axis.cursor !== null) {
      pen.fillStyle = theme.accent;
      pen.fillRect(Math.round(axis.x(axis.cursor)), 0, 1, this.height);
    }
    pen.restore();
    pen.fillStyle = theme.line;
    pen.fillRect(axis.left - 1, 0, 1, this.height);
    this.names(pen);
  }

  // A level: a dashed line with its words beside the chart.
  level(pen, y, words, colour = theme.ink) {
    pen.strokeStyle = colour;
    pen.lineWidth = 1;
    pen.setLineDash([5, 4]);
    pen.beginPath();
    pen.moveTo(axis.left - 4, y);
    pen.lineTo(axis.width, y);
    pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = theme.ink;
    pen.fillText(fitted(pen, words, axis.left - 14), 8, Math.min(Math.max(y, 8), this.height - 8));
  }
}

// --- memory ------------------------------------------------------------------------------------------------------

// Phases of a pool along a track: what the table says while a stage runs, and between two what both have.
function residents(track, memory) {
  const phases = new Map(memory.phases.map((phase) => [phase.stage, phase]));
  const row = track.rows.findIndex((own) => own.pool === memory.pool);
  const found = [];
  if (row < 0) return found;
  const rank = track.rows[row].rank;
  const own = track.rows.flatMap((place, at) => (place.pool === memory.pool && place.rank === rank ? [...track.events[at]] : []));
  own.sort((a, b) => track.start[a] - track.start[b]);
  for (const at of own) {
    const phase = phases.get(track.subject.labels[track.label[at]].memory);
    if (!phase || !track.length[at]) continue;
    const before = found[found.length - 1];
    const from = track.start[at];
    if (before && from > before.to) found.push(between(before, phase, from));
    found.push({ from, to: from + track.length[at], phase, words: phase.stage });
  }
  return found;
}

const shared = new Map();

function between(before, phase, to) {
  const key = `${before.words}\n${phase.stage}`;
  if (!shared.has(before.phase)) shared.set(before.phase, new Map());
  const known = shared.get(before.phase);
  if (!known.has(key)) {
    const there = new Map(phase.objects.map(([name, count]) => [name, count]));
    const objects = before.phase.objects
      .filter(([name]) => there.has(name))
      .map(([name, count, kind]) => [name, Math.min(count, there.get(name)), kind]);
    known.set(key, { objects, bytes: objects.reduce((sum, [, count]) => sum + count, 0) });
  }
  return { from: before.to, to, phase: known.get(key), words: `between ${before.phase.stage || "stages"} and ${phase.stage}: what both hold` };
}

class Memory extends Strip {
  constructor(track, memory) {
    const name = data.subjects.length > 1 ? `${track.subject.short}: ` : "";
    super(
      `${name}memory of a device of ${memory.pool}`,
      112,
      `At most ${bytes(memory.peak)} of ${bytes(memory.capacity)}.`,
    );
    this.memory = memory;
    this.track = track;
    this.parts = residents(track, memory);
    this.most = Math.max(memory.capacity, memory.peak) * 1.12;
  }

  y(count) {
    return this.height - 2 - (count / this.most) * (this.height - 6);
  }

  fill(pen) {
    const { offset } = this.track;
    let taken = -1;
    for (const part of this.visible()) {
      const x = axis.x(part.from + offset);
      const room = axis.x(part.to + offset) - x;
      if (room < 1 && Math.floor(x) === taken) continue;
      taken = Math.floor(x);
      let sum = 0;
      pen.globalAlpha = part.phase.stage ? 1 : 0.55;
      for (const [, count, kind] of part.phase.objects) {
        pen.fillStyle = kind < data.objects.length ? data.objects[kind][1] : data.other;
        const top = this.y(sum + count);
        const tall = this.y(sum) - top;
        pen.fillRect(x, top + (tall > 3 && room > 3 ? 1 : 0), Math.max(room, 1), tall - (tall > 3 && room > 3 ? 1 : 0));
        sum += count;
      }
    }
    pen.globalAlpha = 1;
  }

  visible() {
    const { offset } = this.track;
    const from = this.parts.findIndex((part) => part.to + offset >= axis.from);
    if (from < 0) return [];
    const to = this.parts.findIndex((part) => part.from + offset > axis.to);
    return this.parts.slice(from, to < 0 ? undefined : to);
  }

  names(pen) {
    this.level(pen, this.y(this.memory.capacity), `capacity ${bytes(this.memory.capacity)}`, theme.bad);
    pen.fillStyle = theme.soft;
    pen.fillText(fitted(pen, `peak ${bytes(this.memory.peak)}`, axis.left - 14), 8, Math.min(Math.max(this.y(this.memory.peak), this.y(this.memory.capacity) + 17), this.height - 25));
    pen.fillText("0", 8, this.height - 9);
  }

  describe(time) {
    const own = this.parts.find((part) => part.from + this.track.offset <= time && time <= part.to + this.track.offset);
    if (!own) return "";
    const lines = own.phase.objects.map(([name, count]) => `${name}: ${bytes(count)}`);
    return [`${own.words}: ${bytes(own.phase.bytes)} of ${bytes(this.memory.capacity)}`, ...lines].join("\n");
  }
}

// --- queues ------------------------------------------------------------------------------------------------------

class Depth extends Strip {
  constructor(track, queue) {
    super(`${whose(track)}batches in queue ${queue.id}`, 62, `It holds ${queue.capacity}.`);
    this.queue = queue;
    this.track = track;
    this.times = Float64Array.from(queue.points, ([time]) => time);
  }

  y(depth) {
    return this.height - 3 - (depth / (this.queue.capacity + 0.5)) * (this.height - 8);
  }

  // Number of the last point at or before `time`.
  at(time) {
    let low = 0;
    let high = this.times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  fill(pen) {
    const { points } = this.queue;
    const zero = this.y(0);
    pen.beginPath();
    pen.moveTo(axis.left, zero);
    const { offset, last } = this.track;
    for (let n = Math.max(0, this.at(axis.from - offset)); n < points.length && points[n][0] + offset <= axis.to; n += 1) {
      const x = Math.max(axis.x(points[n][0] + offset), axis.left);
      const next = axis.x(offset + (n + 1 < points.length ? points[n + 1][0] : last));
      pen.lineTo(x, this.y(points[n][1]));
      pen.lineTo(Math.min(next, axis.width), this.y(points[n][1]));
    }
    pen.strokeStyle = theme.accent;
    pen.lineWidth = 2;
    pen.stroke();
    pen.lineTo(axis.width, zero);
    pen.globalAlpha = 0.16;
    pen.fillStyle = theme.accent;
    pen.fill();
    pen.globalAlpha = 1;
  }

  names(pen) {
    this.level(pen, this.y(this.queue.capacity), `capacity ${this.queue.capacity}`);
    pen.fillStyle = theme.soft;
    pen.fillText("0", 8, this.height - 9);
  }

  describe(time) {
    const n = this.at(time - this.track.offset);
    return n < 0 ? "" : `${this.queue.id}: ${this.queue.points[n][1]} of ${this.queue.capacity} batches`;
  }
}

// --- ages --------------------------------------------------------------------------------------------------------

class Ages extends Strip {
  constructor(track, entry) {
    const bound = entry.promised === null ? "no bound is promised" : `at most ${entry.promised} is promised`;
    super(`${whose(track)}age of the samples of ${entry.stage}, in steps; ${bound}`, 74, "Share of the samples of a step by age.");
    this.track = track;
    this.steps = new Map(entry.steps);
    this.bound = entry.promised;
    this.shades = ["#0072B2", "#56B4E9", "#F0E442", "#E69F00", "#D55E00"];
  }

  fill(pen) {
    for (const { step, from, to } of stepsOf(this.track)) {
      const x = Math.max(axis.x(from + this.track.offset), axis.left);
      const room = axis.x(to + this.track.offset) - x;
      const ages = this.steps.get(step);
      if (!ages || room <= 0 || x > axis.width) continue;
      const total = ages.reduce((sum, [, count]) => sum + count, 0);
      let top = 3;
      for (const [age, count] of ages) {
        const tall = (count / total) * (this.height - 6);
        const colour = this.shades[Math.min(age, this.shades.length - 1)];
        pen.fillStyle = colour;
        pen.fillRect(x + 1, top, Math.max(room - 2, 1), tall);
        pen.fillStyle = inkOn(colour);
        if (room > 30 && tall > 13) pen.fillText(fitted(pen, `age ${age}`, room - 8) || String(age), x + 6, top + tall / 2);
        top += tall;
      }
    }
  }

  names(pen) {
    pen.fillStyle = theme.soft;
    pen.fillText("100 %", 8, 10);
    pen.fillText(fitted(pen, "of a step's samples", axis.left - 14), 8, this.height - 12);
  }

  describe(time) {
    const own = stepsOf(this.track).find((step) => step.from <= time - this.track.offset && time - this.track.offset <= step.to);
    const ages = own && this.steps.get(own.step);
    if (!ages) return "";
    const what = this.track.kind === "simulated" ? "samples" : "ranks that generated";
    return [`step ${own.step} trains on`, ...ages.map(([age, count]) => `age ${age}: ${number(count)} ${what}`)].join("\n");
  }
}

function makeStrips() {
  for (const subject of data.subjects) {
    const own = tracks.filter((track) => track.subject === subject);
    if (!own.length) continue;
    const named = (kind) => own.find((track) => track.kind === kind);
    for (const memory of subject.memory) if (residents(own[0], memory).length) new Memory(own[0], memory);
    for (const queue of subject.queues) new Depth(named(queue.track), queue);
    for (const entry of subject.ages) new Ages(named(entry.track), entry);
  }
}

// What to write before the words of a strip, where there are several tracks to tell apart.
function whose(track) {
  const several = tracks.filter((own) => own.subject === track.subject).length > 1;
  return (data.subjects.length > 1 ? `${track.subject.short}: ` : "") + (several ? `${track.kind} ` : "");
}
