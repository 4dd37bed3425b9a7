// A place of the source, chosen: what it caused is listed, its boxes in the graph and its bars stand out.
function choosePlace(key, go = false) {
  const known = all(".effects").some((list) => list.dataset.key === key);
  const wanted = known ? key : "";
  for (const piece of all(".s")) piece.classList.toggle("chosen", wanted !== "" && piece.dataset.key === wanted);
  const boxes = new Set();
  for (const list of all(".effects")) {
    const own = wanted !== "" && list.dataset.key === wanted;
    list.classList.toggle("chosen", own);
    if (own) for (const item of all("li", list)) boxes.add(item.dataset.box);
  }
  for (const hint of all(".hint")) hint.hidden = wanted !== "";
  for (const node of all("figure.graph g.node")) {
    const title = node.querySelector("title");
    node.classList.toggle("hit", Boolean(title) && boxes.has(title.textContent));
  }
  gantt.place = tracks.some((track) => track.subject.labels.some((label) => label.span === wanted)) ? wanted : "";
  axis.draw();
  if (!go || !wanted) return;
  const piece = all(".s").find((own) => own.dataset.key === wanted && own.tabIndex === 0);
  if (piece) {
    piece.focus({ preventScroll: true });
    piece.scrollIntoView({ block: "center" });
  }
}

document.addEventListener("click", (event) => {
  const piece = event.target.closest(".s, a[data-key]");
  if (!piece) return;
  const again = piece.matches(".s.chosen");
  choosePlace(again ? "" : piece.dataset.key, piece.matches("a"));
  if (piece.matches("a")) event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if ((event.key === "Enter" || event.key === " ") && event.target.matches(".s")) {
    choosePlace(event.target.classList.contains("chosen") ? "" : event.target.dataset.key);
    event.preventDefault();
  } else if (event.key === "Escape" && event.target !== gantt.canvas) choosePlace("");
});

// --- size of the graph -------------------------------------------------------------------------------------------

for (const figure of all("figure.graph")) {
  const svg = figure.querySelector("svg");
  const paper = figure.querySelector(".paper");
  const [, , width, height] = svg.getAttribute("viewBox").split(/\s+/).map(Number);
  const natural = (width * 4) / 3; // points
  let size = 1;
  const show = () => {
    svg.setAttribute("width", String(natural * size));
    svg.setAttribute("height", String(((height * 4) / 3) * size));
  };
  const fit = () => {
    size = Math.min(1, (paper.clientWidth - 4) / natural) || 1;
    show();
  };
  figure.addEventListener("click", (event) => {
    const how = event.target.dataset.zoom;
    if (how === "fit") fit();
    else if (how) {
      size = Math.min(4, Math.max(0.1, size * (how === "in" ? 1.25 : 0.8)));
      show();
    }
  });
  fit();
}
