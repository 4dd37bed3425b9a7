// The chart of bars: rows of pools or ranks, a colour for every stage, outlines on the critical cycle, idle stretches.
const gantt = {
  canvas: byId("gantt"),
  ranks: false, // a row for every rank
  scroll: 0,
  most: 560, // pixels of height; more rows are scrolled
  top: 26,
  chosen: null, // {track, at}
  place: "", // key of the source place whose bars stand out
  later: null, // the outline of the chosen bar, drawn after its row
  lines: [], // what is drawn, from top to bottom

  layout() {
    this.lines = [];
    let y = 0;
    for (const track of tracks) {
      this.lines.push({ track, row: -1, y, height: 20 });
      y += 20;
      const first = new Map();
      for (const row of track.rows) first.set(row.pool, Math.min(first.get(row.pool) ?? Infinity, row.rank));
      track.rows.forEach((row, at) => {
        if (!this.ranks && row.rank !== first.get(row.pool)) return;
        const height = row.lane ? 15 : 26;
        this.lines.push({ track, row: at, y, height });
        y += height;
      });
    }
    this.content = y + 4;
    this.height = this.top + Math.min(this.content, this.most);
    this.scroll = Math.max(0, Math.min(this.scroll, this.content - (this.height - this.top)));
  },

  draw() {
    const pen = sized(this.canvas, this.height);
    const width = (axis.width = this.canvas.clientWidth || 800);
    axis.left = width < 640 ? 96 : 168;
    pen.clearRect(0, 0, width, this.height);
    pen.fillStyle = theme.paper;
    pen.fillRect(0, 0, width, this.height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.save();
    pen.beginPath();
    pen.rect(0, this.top, width, this.height - this.top);
    pen.clip();
    pen.translate(0, this.top - this.scroll);
    for (const line of this.lines) {
      if (line.y + line.height < this.scroll || line.y > this.scroll + this.height) continue;
      if (line.row < 0) this.drawTitle(pen, line, width);
      else this.drawRow(pen, line, width);
    }
    this.drawSteps(pen);
    pen.restore();
    this.drawRuler(pen, width);
    this.drawNames(pen);
    this.drawCursor(pen);
  },

  drawRuler(pen, width) {
    pen.fillStyle = theme.raised;
    pen.fillRect(0, 0, width, this.top - 2);
    pen.fillStyle = theme.soft;
    pen.textAlign = "center";
    for (const time of axis.ticks()) {
      const x = axis.x(time);
      if (x < axis.left) continue;
      pen.fillRect(x, this.top - 7, 1, 5);
      pen.fillText(seconds(time), Math.min(Math.max(x, axis.left + 14), width - 24), 10);
    }
    pen.textAlign = "left";
    pen.fillText("time", 10, 11);
  },

  drawTitle(pen, line, width) {
    pen.fillStyle = theme.raised;
    pen.fillRect(0, line.y, width, line.height);
  },

  drawNames(pen) {
    pen.save();
    pen.beginPath();
    pen.rect(0, this.top, axis.left - 1, this.height - this.top);
    pen.clip();
    for (const line of this.lines) {
      const y = line.y + this.top - this.scroll;
      if (y + line.height < this.top || y > this.height) continue;
      pen.fillStyle = line.row < 0 ? theme.raised : theme.paper;
      pen.fillRect(0, y, axis.left - 1, line.height);
      const row = line.track.rows[line.row];
      if (row && row.lane) continue;
      pen.fillStyle = row ? theme.ink : theme.soft;
      pen.font = row ? "12px system-ui, sans-serif" : "600 12px system-ui, sans-serif";
      const pool = row && line.track.subject.pools.find((found) => found.name === row.pool);
      const name = !row ? line.track.title : this.ranks ? `${row.pool} ${row.rank}` : `${row.pool}${pool && pool.size > 1 ? ` ×${pool.size}` : ""}`;
      pen.fillText(fitted(pen, name, axis.left - 18), 10, y + line.height / 2);
    }
    pen.fillStyle = theme.line;
    pen.fillRect(axis.left - 1, this.top, 1, this.height);
    pen.restore();
  },

  drawSteps(pen) {
    for (const track of tracks) {
      const own = this.lines.filter((line) => line.track === track);
      const top = own[0].y;
      const bottom = own[own.length - 1].y + own[own.length - 1].height;
      let free = -Infinity;
      for (const { step, from, to } of stepsOf(track)) {
        const x = axis.x(to + track.offset);
        const before = Math.max(axis.x(from + track.offset), axis.left);
        if (x < axis.left || before > axis.width) continue;
        pen.fillStyle = theme.ink;
        pen.globalAlpha = 0.55;
        pen.fillRect(Math.round(x), top, 1, bottom - top);
        pen.globalAlpha = 1;
        const text = `${x - before > 120 ? "end of " : ""}step ${step}${step <= track.warmUp && x - before > 130 ? " (warm-up)" : ""}`;
        const room = pen.measureText(text).width;
        if (x - room - 6 > Math.max(free, axis.left)) {
          pen.fillStyle = theme.soft;
          pen.textAlign = "right";
          pen.fillText(text, x - 4, top + 10);
          pen.textAlign = "left";
          free = x;
        }
      }
    }
  },

  drawCursor(pen) {
    if (axis.cursor === null) return;
    const x = axis.x(axis.cursor);
    if (x < axis.left) return;
    pen.fillStyle = theme.accent;
    pen.fillRect(Math.round(x), this.top, 1, this.height - this.top);
  },

  drawRow(pen, line, width) {
    const { track, row, y, height } = line;
    pen.fillStyle = theme.line;
    pen.fillRect(axis.left, y + height - 1, width - axis.left, 1);
    pen.save();
    pen.beginPath();
    pen.rect(axis.left, y, width - axis.left, height);
    pen.clip();
    const from = axis.from - track.offset;
    const to = axis.to - track.offset;
    const scale = (width - axis.left - axis.right) / (axis.to - axis.from);
    const begin = axis.x(track.offset);
    const idle = track.idleOf[row];
    pen.fillStyle = paint(pen, "none", 1);
    for (let at = firstAfter(idle, track.idle.start, track.idle.length, from); at < idle.length; at += 1) {
      const start = track.idle.start[idle[at]];
      if (start > to) break;
      const room = track.idle.length[idle[at]] * scale;
      if (room >= 2) pen.fillRect(begin + start * scale, y + 3, room, height - 7);
    }
    this.drawBars(pen, line, from, to, begin, scale);
    pen.restore();
  },

  // Bars that are thinner than a pixel share it: of those, the first of a pixel is drawn.
  drawBars(pen, line, from, to, begin, scale) {
    const { track, row, y, height } = line;
    const own = track.events[row];
    const { start, length, label } = track;
    const labels = track.subject.labels;
    const top = y + 3;
    const tall = height - 7;
    let taken = -1;
    let style = null;
    for (let n = firstAfter(own, start, length, from); n < own.length; n += 1) {
      const at = own[n];
      if (start[at] > to) break;
      const x = begin + start[at] * scale;
      const room = length[at] * scale;
      const words = labels[label[at]];
      if (room < 1) {
        if (words.waits && length[at] < 1) continue;
        const pixel = Math.floor(x);
        if (pixel === taken) continue;
        taken = pixel;
      }
      const [colour, texture] = fillOf(words);
      const wanted = paint(pen, colour, texture);
      if (wanted !== style) pen.fillStyle = style = wanted;
      const out = this.place && words.span !== this.place;
      pen.globalAlpha = out ? 0.25 : words.waits ? 0.5 : 1;
      if (words.waits) pen.fillRect(x, y + height / 2 - 2, Math.max(room, 1), 4);
      else pen.fillRect(x, top, Math.max(room, 1), tall);
      if (this.chosen && this.chosen.track === track && this.chosen.at === at) this.later = [x, room, top, tall];
      if (room < 3) continue;
      if (!words.waits) {
        pen.lineWidth = words.cycle ? 2.4 : 0.8;
        pen.strokeStyle = words.cycle ? theme.ink : theme.soft;
        const inset = words.cycle ? 1.2 : 0.4;
        if (room > 5 || !words.cycle) pen.strokeRect(x + inset, top + inset, Math.max(room - 2 * inset, 0.5), tall - 2 * inset);
      }
      if (room > 34 && height > 20 && !words.waits) {
        const left = Math.max(x, axis.left);
        const text = fitted(pen, words.short, Math.min(x + room, axis.width) - left - 10);
        if (text) {
          pen.fillStyle = inkOn(colour);
          style = null;
          if (texture) {
            pen.globalAlpha *= 0.8;
            pen.fillStyle = colour;
            pen.fillRect(left + 3, top + 3, pen.measureText(text).width + 4, tall - 6);
            pen.globalAlpha = out ? 0.25 : 1;
            pen.fillStyle = inkOn(colour);
          }
          pen.fillText(text, left + 5, y + height / 2);
        }
      }
    }
    pen.globalAlpha = 1;
    if (this.later) this.drawChosen(pen, ...this.later);
    this.later = null;
  },

  drawChosen(pen, x, room, top, tall) {
    pen.globalAlpha = 1;
    pen.strokeStyle = theme.accent;
    pen.lineWidth = 3;
    pen.strokeRect(x - 1, top - 1, Math.max(room, 2) + 2, tall + 2);
  },

  lineAt(y) {
    const inside = y - this.top + this.scroll;
    return y < this.top ? null : this.lines.find((line) => inside >= line.y && inside < line.y + line.height) || null;
  },

  // {track, at} of the bar there, {track, idle} of an idle stretch, or null.
  find(x, y) {
    const line = this.lineAt(y);
    if (!line || line.row < 0 || x < axis.left) return null;
    const { track, row } = line;
    const pixel = (axis.to - axis.from) / (axis.width - axis.left - axis.right);
    const time = axis.time(x) - track.offset;
    const own = track.events[row];
    let best = null;
    for (let n = firstAfter(own, track.start, track.length, time - 2 * pixel); n < own.length; n += 1) {
      const at = own[n];
      if (track.start[at] > time + 2 * pixel) break;
      const inside = track.start[at] <= time && time <= track.start[at] + track.length[at];
      if (best === null || inside || track.length[at] > track.length[best]) best = at;
      if (inside && track.length[at] > 0) break;
    }
    if (best !== null) return { track, at: best };
    const idle = track.idleOf[row];
    const n = firstAfter(idle, track.idle.start, track.idle.length, time);
    return n < idle.length && track.idle.start[idle[n]] <= time ? { track, idle: idle[n] } : null;
  },
};
report.gantt = gantt;
