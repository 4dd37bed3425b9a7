// What all parts share: the page's data, words for amounts, elements, colours of the theme, the tip beside the pointer.
const data = JSON.parse(document.getElementById("data").textContent);
document.documentElement.classList.add("interactive");
const report = (window.rlflowReport = { data, errors: [] });
window.addEventListener("error", (event) => report.errors.push(String(event.message)));

const byId = (id) => document.getElementById(id);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function seconds(us) {
  const size = Math.abs(us);
  if (size >= 3.6e9) return `${Math.trunc(us / 3.6e9)} h ${Number(((size % 3.6e9) / 6e7).toFixed(1))} min`;
  if (size >= 6e8) return `${(us / 6e7).toFixed(1)} min`;
  if (size >= 1e6) return `${(us / 1e6).toPrecision(Math.min(21, Math.max(3, String(Math.trunc(size / 1e6)).length)))} s`;
  if (size >= 1e3) return `${Number((us / 1e3).toPrecision(3))} ms`;
  return `${Math.round(us)} µs`;
}

function bytes(count) {
  for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (count >= scale) return `${(count / scale).toFixed(count >= 100 * scale ? 0 : 1)} ${unit}`;
  }
  return `${count} B`;
}

const number = (value) => String(Number(value.toPrecision(4)));

// --- colours -----------------------------------------------------------------------------------------------------

const theme = {};

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "raised", "ink", "soft", "line", "accent", "hatch", "chosen", "bad"]) {
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
  theme.textures = new Map();
}

function luminance(colour) {
  const part = (at) => parseInt(colour.slice(at, at + 2), 16) / 255;
  return 0.2126 * part(1) ** 2.2 + 0.7152 * part(3) ** 2.2 + 0.0722 * part(5) ** 2.2;
}

const inkOn = (colour) => (luminance(colour) > 0.19 ? "#111111" : "#ffffff");

// Stripes over a colour; texture 0 is the colour itself.
function paint(context, colour, texture) {
  if (!texture) return colour;
  const key = `${colour}/${texture}`;
  if (!theme.textures.has(key)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    if (colour !== "none") {
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 8, 8);
    }
    pen.strokeStyle = colour === "none" ? theme.hatch : inkOn(colour);
    pen.globalAlpha = colour === "none" ? 0.75 : 0.55;
    pen.lineWidth = 1.4;
    pen.beginPath();
    for (const shift of [-8, 0, 8]) {
      if (texture % 2) pen.moveTo(shift, 8), pen.lineTo(shift + 8, 0);
      else pen.moveTo(shift, 0), pen.lineTo(shift + 8, 8);
    }
    pen.stroke();
    theme.textures.set(key, context.createPattern(tile, "repeat"));
  }
  return theme.textures.get(key);
}

function fillOf(label) {
  const own = data.stages[label.stage];
  return own && !label.waits && ["run", "call"].includes(label.kind) ? own : [data.other, 0];
}

// --- the tip -----------------------------------------------------------------------------------------------------

const tip = byId("tip");

function showTip(text, event) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4))}px`;
}

// --- light and dark ----------------------------------------------------------------------------------------------

const themed = []; // called when the colours have changed
readTheme();
byId("theme").addEventListener("click", () => {
  const next = { system: "light", light: "dark", dark: "system" }[document.documentElement.dataset.theme || "system"];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  byId("theme").textContent = `◐ ${next}`;
  byId("theme").setAttribute("aria-label", `colours: ${next === "system" ? "as the system" : next}`);
  recolour();
});
for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", recolour);

function recolour() {
  readTheme();
  for (const told of themed) told();
}
