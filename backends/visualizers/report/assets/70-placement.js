// The map of hosts: a box for every host, in it the devices of every pool in its colour.
const poolColour = (at) => data.fills[at % data.fills.length];

function dress(chip, at) {
  chip.style.background = poolColour(at);
  const second = Math.floor(at / data.fills.length) % 2;
  if (second) chip.style.backgroundImage = "repeating-linear-gradient(45deg, transparent 0 3px, rgba(0,0,0,.45) 3px 5px)";
}

function hostWords(subject, host) {
  const lines = [host.name];
  for (const [index, rank, count, pool] of host.devices) {
    const name = subject.pools[pool].name;
    lines.push(count > 1 ? `devices ${index}-${index + count - 1}: ${name} ranks ${rank}-${rank + count - 1}` : `device ${index}: ${name} rank ${rank}`);
  }
  for (const [pool, count] of host.functions) lines.push(`${count} worker${count > 1 ? "s" : ""} of ${subject.pools[pool].name}`);
  return lines.join("\n");
}

for (const map of all(".map")) {
  const subject = data.subjects[Number(map.dataset.subject)];
  subject.hosts.forEach((host, at) => {
    const devices = element("div", { class: "devices" });
    // Pools may share devices: then the box has a row for each.
    const rows = new Map();
    for (const [, , count, pool] of host.devices) rows.set(pool, (rows.get(pool) || 0) + count);
    for (const [pool, count] of rows) {
      for (let n = 0; n < Math.min(count, 16); n += 1) {
        const chip = element("i", {});
        chip.style.flex = "1";
        dress(chip, pool);
        devices.append(chip);
      }
    }
    const box = element("div", { class: "host", role: "listitem", tabindex: at ? "-1" : "0", "aria-label": hostWords(subject, host) }, element("span", {}, `\u200e${host.name}`), devices);
    map.append(box);
  });
  const hosts = [...map.children];
  const words = (box) => hostWords(subject, subject.hosts[hosts.indexOf(box)]);
  map.addEventListener("pointermove", (event) => {
    const box = event.target.closest(".host");
    showTip(box ? words(box) : "", event);
  });
  map.addEventListener("pointerleave", () => showTip(""));
  map.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
    const here = hosts.indexOf(document.activeElement);
    if (!by || here < 0) return;
    const next = hosts[Math.max(0, Math.min(here + by, hosts.length - 1))];
    hosts[here].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    const place = next.getBoundingClientRect();
    showTip(words(next), { clientX: place.right, clientY: place.top });
    event.preventDefault();
  });
  map.addEventListener("focusout", () => showTip(""));
}

for (const table of all("#placement table")) for (const chip of all(".chip", table)) dress(chip, Number(chip.dataset.pool));
