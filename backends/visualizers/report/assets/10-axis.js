// The time that all charts of the timeline share, in microseconds. A change asks for one drawing in the next frame.
const axis = {
  from: 0,
  to: 1,
  last: 1,
  left: 168, // pixels of names beside the charts
  right: 10,
  width: 800, // pixels of a chart, names and all
  cursor: null,
  charts: [],
  frames: [], // milliseconds of the last drawings
  pending: false,

  x(time) {
    return this.left + ((time - this.from) / (this.to - this.from)) * (this.width - this.left - this.right);
  },
  time(x) {
    return this.from + ((x - this.left) / (this.width - this.left - this.right)) * (this.to - this.from);
  },
  show(from, to) {
    const least = Math.max(this.last / 1e6, 10);
    const span = Math.min(Math.max(to - from, least), this.last * 1.04);
    const slack = this.last * 0.02;
    const start = Math.min(Math.max(from, -slack), this.last + slack - span);
    this.from = start;
    this.to = start + span;
    this.draw();
  },
  fit() {
    this.show(-this.last * 0.005, this.last * 1.01);
  },
  zoom(factor, around = (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  },
  pan(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  },
  draw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.drawNow();
    });
  },
  drawNow() {
    const began = performance.now();
    for (const chart of this.charts) chart.draw();
    this.frames.push(performance.now() - began);
    if (this.frames.length > 600) this.frames.shift();
  },
  // Times at which to write marks: about one for every 110 pixels, at round numbers.
  ticks() {
    const wanted = (this.to - this.from) / Math.max(2, (this.width - this.left) / 110);
    const units = [1, 1e3, 1e6, 6e7, 3.6e9].filter((unit) => unit <= wanted);
    const unit = units.length ? units[units.length - 1] : 1;
    const steps = unit === 6e7 || unit === 1e6 ? [1, 2, 5, 10, 20, 30, 60] : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
    const step = unit * (steps.find((count) => count * unit >= wanted) || steps[steps.length - 1]);
    const found = [];
    for (let time = Math.max(0, Math.ceil(this.from / step)) * step; time <= this.to; time += step) found.push(time);
    return found;
  },
};
report.axis = axis;

// Sharp on every screen: as many pixels as the screen has. Returns the pen, in CSS pixels.
function sized(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth || axis.width;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
}

function fitted(pen, text, room) {
  if (room < 14) return "";
  if (text.length * 5 < room && pen.measureText(text).width <= room) return text;
  const most = Math.floor(room / 6.4);
  return most < 3 ? "" : text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
