// Mouse, touch and keyboard on the timeline. Every chart of the timeline moves and zooms the same axis.
function movable(canvas) {
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    held = { x: event.clientX, y: event.clientY, moved: false, scroll: gantt.scroll };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return;
    const by = event.clientX - held.x;
    if (!held.moved && Math.abs(by) + Math.abs(event.clientY - held.y) < 4) return;
    held.moved = true;
    canvas.classList.add("moving");
    axis.pan(-by / (axis.width - axis.left - axis.right));
    held.x = event.clientX;
    if (canvas === gantt.canvas) scrollTo(held.scroll - (event.clientY - held.y));
  });
  canvas.addEventListener("pointerup", (event) => {
    const was = held;
    held = null;
    canvas.classList.remove("moving");
    if (was && !was.moved && canvas === gantt.canvas) choose(gantt.find(event.offsetX, event.offsetY));
  });
  canvas.addEventListener("pointercancel", () => (held = null));
  canvas.addEventListener("dblclick", (event) => axis.zoom(event.shiftKey ? 2 : 0.5, axis.time(event.offsetX)));
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (event.ctrlKey || event.metaKey) axis.zoom(Math.exp(event.deltaY * 0.002), axis.time(event.offsetX));
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        axis.pan((event.deltaX || event.deltaY) / axis.width);
      } else return;
      event.preventDefault();
    },
    { passive: false },
  );
  canvas.addEventListener("pointerleave", () => {
    axis.cursor = null;
    showTip("");
    axis.draw();
  });
}

function scrollTo(y) {
  gantt.scroll = Math.max(0, Math.min(y, gantt.content - (gantt.height - gantt.top)));
  axis.draw();
}

// Picks the bar `{track, at}`; null lets go.
function choose(found) {
  gantt.chosen = found && found.at !== undefined ? found : null;
  const card = byId("event");
  card.textContent = gantt.chosen ? describe(gantt.chosen.track, gantt.chosen.at) : "No bar is chosen.";
  if (gantt.chosen) reveal();
  axis.draw();
}

// Brings the chosen bar into view.
function reveal() {
  const { track, at } = gantt.chosen;
  const from = track.start[at] + track.offset;
  const to = from + track.length[at];
  if (to < axis.from || from > axis.to) axis.show(from - (axis.to - axis.from) / 3, from + ((axis.to - axis.from) * 2) / 3);
  const line = gantt.lines.find((own) => own.track === track && own.row === track.row[at]);
  if (!line) return;
  const room = gantt.height - gantt.top;
  if (line.y < gantt.scroll) scrollTo(line.y);
  else if (line.y + line.height > gantt.scroll + room) scrollTo(line.y + line.height - room);
}

// Walks from bar to bar: along a row, or to the bar of another row at the same time.
function walk(along, down) {
  const rows = gantt.lines.filter((line) => line.row >= 0 && line.track.events[line.row].length);
  if (!rows.length) return;
  if (!gantt.chosen) {
    const { track, row } = rows[0];
    const own = track.events[row];
    const n = Math.min(firstAfter(own, track.start, track.length, axis.from - track.offset), own.length - 1);
    choose({ track, at: own[n] });
    return;
  }
  const { track, at } = gantt.chosen;
  const here = rows.findIndex((line) => line.track === track && line.row === track.row[at]);
  if (along) {
    const own = track.events[track.row[at]];
    const next = own.indexOf(at) + along;
    if (next >= 0 && next < own.length) choose({ track, at: own[next] });
    return;
  }
  const other = rows[here + down];
  if (!other) return;
  const own = other.track.events[other.row];
  const time = track.start[at] + track.offset - other.track.offset;
  const n = Math.min(firstAfter(own, other.track.start, other.track.length, time), own.length - 1);
  choose({ track: other.track, at: own[n] });
}

function ganttKeys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const arrow = arrows[event.key];
  if (arrow && event.shiftKey) arrow[0] ? axis.pan(arrow[0] * 0.15) : scrollTo(gantt.scroll + arrow[1] * 40);
  else if (arrow) walk(...arrow);
  else if (event.key === "+" || event.key === "=") axis.zoom(0.6, around());
  else if (event.key === "-" || event.key === "_") axis.zoom(1 / 0.6, around());
  else if (event.key === "0") axis.fit();
  else if (event.key === "PageDown" || event.key === "PageUp") scrollTo(gantt.scroll + (event.key === "PageDown" ? 300 : -300));
  else if (event.key === "Escape") choose(null);
  else if (event.key === "Enter" && gantt.chosen) {
    const { track, at } = gantt.chosen;
    choosePlace(track.subject.labels[track.label[at]].span, true);
  } else return;
  event.preventDefault();
}

// Zooming by keyboard keeps the chosen bar where it is.
function around() {
  if (!gantt.chosen) return undefined;
  const { track, at } = gantt.chosen;
  return track.start[at] + track.offset + track.length[at] / 2;
}

function ganttHover(event) {
  const found = gantt.find(event.offsetX, event.offsetY);
  axis.cursor = event.offsetX >= axis.left ? axis.time(event.offsetX) : null;
  axis.draw();
  if (event.buttons) return showTip("");
  if (!found) return showTip("");
  const { track, idle } = found;
  showTip(
    idle === undefined
      ? describe(track, found.at)
      : `no work for ${seconds(track.idle.length[idle])}, from ${seconds(track.idle.start[idle])}`,
    event,
  );
}

// The middle step of a track, past its warm-up, with a little on both sides.
function oneStep() {
  const track = tracks[0];
  const own = stepsOf(track).filter((step) => step.step > track.warmUp);
  const step = own[Math.floor(own.length / 2)];
  if (step) axis.show(step.from - (step.to - step.from) * 0.1, step.to + (step.to - step.from) * 0.1);
}
