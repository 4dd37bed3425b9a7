// Puts the timeline together and draws it for the first time.
function legend() {
  const box = byId("legend");
  const seen = new Set();
  const add = (colour, texture, words) => {
    const chip = element("i", {});
    const stripes = texture % 2 ? 45 : 135;
    chip.style.background = texture ? `repeating-linear-gradient(${stripes}deg, ${colour} 0 3px, ${inkOn(colour)} 3px 4px)` : colour;
    box.append(element("span", { role: "listitem" }, chip, words));
  };
  for (const track of tracks) {
    for (const at of new Set(track.label)) {
      const label = track.subject.labels[at];
      if (label.waits || seen.has(label.stage) || !["run", "call"].includes(label.kind)) continue;
      seen.add(label.stage);
      add(...fillOf(label), label.stage);
    }
  }
  add(data.other, 0, "inserted: reshard, publish, move, checkpoint");
}

function objectLegend() {
  const first = strips.find((strip) => strip instanceof Memory);
  if (!first) return;
  const box = element("div", { class: "legend", role: "list", "aria-label": "colours of what is in memory" });
  for (const [name, colour] of [...data.objects, ["other", data.other]]) {
    const chip = element("i", {});
    chip.style.background = colour;
    box.append(element("span", { role: "listitem" }, chip, name));
  }
  first.box.before(element("h3", {}, "Memory"), box);
}

if (gantt.canvas) {
  const shared = tracks.filter((track) => track.kind === "measured" && tracks.some((other) => other.kind === "simulated" && other.subject === track.subject));
  if (shared.length) {
    const common = stepsOf(shared[0]).map((own) => own.step);
    const best = common[Math.min(2, common.length - 1)] || 1;
    byId("align").value = best;
    byId("align").addEventListener("change", () => {
      align(Number(byId("align").value));
      axis.draw();
    });
    align(best);
  } else {
    byId("align-label").remove();
    setLast();
  }
  if (!tracks.some((track) => new Set(track.rows.map((row) => row.pool)).size < new Set(track.rows.map((row) => `${row.pool} ${row.rank}`)).size)) {
    byId("ranks-label").remove();
  } else {
    byId("ranks").addEventListener("change", (event) => {
      gantt.ranks = event.target.checked;
      gantt.layout();
      axis.draw();
    });
  }
  for (const track of tracks) if (track.note && track.kind === "measured") gantt.canvas.after(element("p", { class: "note" }, track.note));
  legend();
  axis.charts.push(gantt);
  gantt.layout();
  makeStrips();
  objectLegend();
  movable(gantt.canvas);
  gantt.canvas.addEventListener("pointermove", ganttHover);
  gantt.canvas.addEventListener("keydown", ganttKeys);
  byId("zoom-in").addEventListener("click", () => axis.zoom(0.6, around()));
  byId("zoom-out").addEventListener("click", () => axis.zoom(1 / 0.6, around()));
  byId("zoom-fit").addEventListener("click", () => axis.fit());
  byId("zoom-step").addEventListener("click", oneStep);
  themed.push(() => axis.drawNow());
  new ResizeObserver(() => axis.draw()).observe(gantt.canvas);
  axis.fit();
  // A step or three to begin with: of many, single bars would not be seen.
  const steps = stepsOf(tracks[0]);
  const own = steps.filter((step) => step.step > tracks[0].warmUp);
  if (own.length > 5) axis.show(own[0].from - (own[2].to - own[0].from) * 0.04, own[2].to + (own[2].to - own[0].from) * 0.04);
}
report.ready = true;
