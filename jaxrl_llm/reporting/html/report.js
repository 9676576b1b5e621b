"use strict";
// Shades of tokens, and the numbers of a token that is tapped.
const picked = document.getElementById("picked");
for (const section of document.querySelectorAll("#held-out, #groups")) {
  section.addEventListener("change", event => {
    if (event.target.type === "radio") section.className = "show-" + event.target.value;
  });
  section.addEventListener("click", event => {
    for (const old of document.querySelectorAll(".tokens .picked")) old.classList.remove("picked");
    const token = event.target.closest(".tokens i");
    if (token) token.classList.add("picked");
    picked.textContent = token ? JSON.stringify(token.textContent) + "  " + (token.title || "no numbers") : "";
  });
}

// Filter, search and sort the cards of a section.
for (const section of document.querySelectorAll("#held-out, #groups")) {
  const list = section.querySelector(".cards"), cards = [...list.children];
  const filter = section.querySelector(".filter"), search = section.querySelector(".search");
  const sort = section.querySelector(".sort"), count = section.querySelector(".count");
  const texts = new Map(cards.map(card => [card, card.textContent.toLowerCase().replace(/\s+/g, " ")]));
  const update = () => {
    const words = search.value.toLowerCase().trim().replace(/\s+/g, " ");
    const kinds = card => filter.value === card.dataset.kind || card.dataset.kind.split(" ").includes(filter.value);
    for (const card of cards) card.hidden = !((!filter.value || kinds(card)) && texts.get(card).includes(words));
    if (words) for (const folded of section.querySelectorAll(".group:not([hidden]) .samples")) folded.open = true;
    const shown = cards.filter(card => !card.hidden).length;
    count.textContent = shown === cards.length ? `${shown} shown` : `${shown} of ${cards.length} shown`;
    for (const cell of document.querySelectorAll(section.id === "held-out" ? ".cell" : ".none"))
      cell.setAttribute("aria-pressed", String(cell.dataset.kind === filter.value));
  };
  const order = () => {
    const falling = sort.value.startsWith("-"), name = sort.value.replace("-", "");
    const number = card => { const x = parseFloat(card.dataset[name]); return Number.isNaN(x) ? -Infinity : falling ? -x : x; };
    const places = new Map(cards.map((card, place) => [card, place]));
    list.append(...[...cards].sort((a, b) => number(a) - number(b) || places.get(a) - places.get(b)));
  };
  filter.addEventListener("change", update);
  search.addEventListener("input", update);
  if (sort) sort.addEventListener("change", order);
  update();
  if (section.id === "held-out")
    for (const cell of document.querySelectorAll(".cell"))
      cell.addEventListener("click", () => {
        const has = [...filter.options].some(option => option.value === cell.dataset.kind);
        if (!has) return;
        filter.value = filter.value === cell.dataset.kind ? "" : cell.dataset.kind;
        update();
        if (filter.value) section.scrollIntoView({behavior: "smooth"});
      });
}

// Numbers of a chart at the pointer, or moved along by the arrow keys.
const SVG = "http://www.w3.org/2000/svg";
for (const figure of document.querySelectorAll(".chart")) {
  let data, points, place = null, marks = [];
  const svg = figure.querySelector("svg"), reading = figure.querySelector(".reading");
  const scale = x => data.log ? Math.log2(x) : x;
  const prepare = () => {
    data = data || JSON.parse(figure.dataset.chart);
    points = points || [...new Set(data.lines.flatMap(line => line.x.filter((x, n) => line.y[n] !== null)))].sort((a, b) => a - b);
  };
  const toX = x => { const [l, , r, , x0, , x1] = data.view; return l + (r - l) * (scale(x) - scale(x0)) / (scale(x1) - scale(x0)); };
  const toY = y => { const [, t, , b, , y1, , y0] = data.view; return b - (b - t) * (y - y0) / (y1 - y0); };
  const clear = () => { marks.forEach(mark => mark.remove()); marks = []; reading.textContent = ""; };
  const mark = (name, values) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(values)) element.setAttribute(key, value);
    svg.append(element);
    marks.push(element);
  };
  const show = index => {
    clear();
    place = Math.min(points.length - 1, Math.max(0, index));
    const x = points[place];
    if (x === undefined) return;
    const at = toX(x);
    mark("line", {class: "cursor", x1: at, x2: at, y1: data.view[1], y2: data.view[3]});
    const heading = document.createElement("b");
    heading.textContent = `${data.x} ${x}`;
    reading.append(heading);
    for (const line of data.lines) {
      const n = line.x.indexOf(x);
      if (n < 0 || line.y[n] === null) continue;
      mark("circle", {class: "dot", r: 3, cx: at, cy: toY(line.y[n]), fill: `var(--line${line.colour})`});
      const row = document.createElement("div"), key = document.createElement("i");
      key.className = "key c" + line.colour;
      const unit = data.unit === "value" ? "" : " " + data.unit.replace(/^.*, /, "");
      row.append(key, `${line.name ? line.name + ": " : ""}${line.y[n]}${unit}`);
      reading.append(row);
    }
  };
  figure.addEventListener("pointermove", event => {
    prepare();
    const frame = svg.getBoundingClientRect(), x = (event.clientX - frame.left) / frame.width * svg.viewBox.baseVal.width;
    let best = 0;
    points.forEach((point, n) => { if (Math.abs(toX(point) - x) < Math.abs(toX(points[best]) - x)) best = n; });
    show(best);
  });
  figure.addEventListener("pointerleave", clear);
  figure.addEventListener("blur", clear);
  figure.addEventListener("keydown", event => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!by) return;
    prepare();
    event.preventDefault();
    show(place === null ? (by > 0 ? 0 : points.length - 1) : place + by);
  });
}
