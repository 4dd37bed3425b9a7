// Line charts of a run, as SVG. The pointer and the arrow keys read values.
const NS = "http://www.w3.org/2000/svg";

function drawn(tag, attributes, ...children) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Round numbers from low to high, four or so.
function rounds(low, high, wanted = 4) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((count) => count * power).find((size) => size >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

function smooth(points) {
  const keep = 1 - 1 / Math.min(Math.max(points.length / 20, 4), 25);
  let total = 0;
  let weight = 0;
  return points.map(([x, y]) => {
    total = keep * total + y;
    weight = keep * weight + 1;
    return [x, total / weight];
  });
}

function curve(chart) {
  const [width, height, left, right, top, bottom] = [460, 210, 58, 10, 8, 26];
  const colour = (at) => `var(--line-${at % 6})`;
  const points = chart.series.flatMap((line) => line.points);
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  let [low, high] = [chart.from_zero ? 0 : Math.min(...ys), Math.max(...ys)];
  if (high === low) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const slack = (high - low) * 0.06;
  high += slack;
  if (!chart.from_zero) low -= slack;
  const first = Math.min(...xs);
  const end = Math.max(...xs) === first ? first + 1 : Math.max(...xs);
  const px = (x) => left + ((x - first) / (end - first)) * (width - left - right);
  const py = (y) => top + (1 - (y - low) / (high - low)) * (height - top - bottom);
  const path = (line) => line.map(([x, y], at) => `${at ? "L" : "M"}${px(x).toFixed(1)},${py(y).toFixed(1)}`).join("");

  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: "0", role: "img" });
  for (const value of rounds(low, high)) {
    svg.append(drawn("line", { class: "grid", x1: left, x2: width - right, y1: py(value), y2: py(value) }));
    svg.append(drawn("text", { x: left - 6, y: py(value) + 4, "text-anchor": "end" }, number(value)));
  }
  for (const value of rounds(first, end, 5).filter(Number.isInteger)) {
    svg.append(drawn("text", { x: px(value), y: height - 8, "text-anchor": "middle" }, String(value)));
  }
  svg.append(drawn("text", { x: left - 12, y: height - 8, "text-anchor": "end" }, "step"));
  chart.series.forEach((line, at) => {
    const stroke = `stroke: ${colour(at)}`;
    if (line.smooth && line.points.length > 3) {
      svg.append(drawn("path", { class: "raw", d: path(line.points), style: stroke }));
      svg.append(drawn("path", { class: "main", d: path(smooth(line.points)), style: stroke }));
    } else {
      svg.append(drawn("path", { class: "main", d: path(line.points), style: stroke, "stroke-dasharray": line.dashed ? "7 5" : "none" }));
    }
    if (line.dots || (line.points.length < 4 && !line.dashed)) {
      for (const [x, y] of line.points) svg.append(drawn("circle", { cx: px(x), cy: py(y), r: 3, style: `fill: ${colour(at)}` }));
    }
  });
  const cursor = drawn("line", { class: "cursor", y1: top, y2: height - bottom, x1: left, x2: left, visibility: "hidden" });
  svg.append(cursor);

  const read = element("output", {});
  const steps = [...new Set(xs)].sort((a, b) => a - b);
  let place = -1;
  const look = (at) => {
    place = Math.max(0, Math.min(at, steps.length - 1));
    const values = chart.series.map((line) => {
      const near = line.points.reduce((best, point) => (Math.abs(point[0] - steps[place]) < Math.abs(best[0] - steps[place]) ? point : best));
      const name = chart.series.length > 1 ? `${line.name} ` : "";
      return line.dashed || near[0] === steps[place] ? `${name}${number(near[1])}` : "";
    });
    read.textContent = `step ${steps[place]}: ${values.filter(Boolean).join(", ")} ${chart.unit}`;
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", px(steps[place]));
    cursor.setAttribute("x2", px(steps[place]));
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = first + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - right)) * (end - first);
    look(steps.reduce((best, step, at) => (Math.abs(step - x) < Math.abs(steps[best] - x) ? at : best), 0));
  });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    look(by === -Infinity ? 0 : by === Infinity ? steps.length - 1 : place + by);
    event.preventDefault();
  });
  svg.addEventListener("focus", () => look(place < 0 ? steps.length - 1 : place));

  const last = chart.series[0].points[chart.series[0].points.length - 1];
  svg.setAttribute("aria-label", `${chart.title}: ${number(chart.series[0].points[0][1])} first, ${number(last[1])} last; arrows read values`);
  const title = element("figcaption", {}, element("span", {}, chart.title + (chart.unit ? ` (${chart.unit})` : "")), read);
  const figure = element("figure", { class: "curve" }, title, svg);
  if (chart.series.length > 1) {
    const words = chart.series.map((line, at) => {
      const chip = element("i", {});
      chip.style.background = colour(at);
      return element("span", { role: "listitem" }, chip, line.name + (line.dashed ? " (dashed)" : ""));
    });
    figure.append(element("div", { class: "legend", role: "list" }, ...words));
  }
  return figure;
}

for (const box of all(".curves")) {
  for (const chart of data.subjects[Number(box.dataset.subject)].curves) box.append(curve(chart));
}
