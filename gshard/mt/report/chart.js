/* Line charts that fit their box: axes, curves, dots, a tip that follows the pointer or the keys. */

const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function three(value) {
  const size = Math.abs(value);
  return String(+value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2));
}

const forms = {
  whole: (value) => Math.round(value).toLocaleString("en"),
  short(value) {
    for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(value) >= 0.9995 * size) return three(value / size) + letter;
    return three(value);
  },
  number: (value) => String(+value.toPrecision(3)),
  fixed: (value) => value.toFixed(2),
  one: (value) => value.toFixed(1),
  signed: (value) => (value > 0 ? "+" : value < 0 ? "\u2212" : "") + Math.abs(value).toFixed(1),
  share: (value) => `${+(100 * value).toFixed(1)}%`,
  duration(value) {
    if (value < 100) return `${Math.round(value)} s`;
    if (value < 6000) return `${Math.round(value / 60)} min`;
    return value < 172800 ? `${three(value / 3600)} h` : `${three(value / 86400)} d`;
  },
};

/* Round numbers from low to high, about `count` of them; whole minutes and hours for durations. */
function ticks(low, high, count, time) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const unit = !time || rough < 60 ? 1 : rough < 3600 ? 60 : rough < 86400 ? 3600 : 86400;
  const power = 10 ** Math.floor(Math.log10(rough / unit));
  const step = unit * power * [1, 2, 5, 10].find((each) => each * power * unit >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++)
    found.push(+(n * step).toPrecision(12));
  return found;
}

function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const by = Math.max(1, Math.ceil((last - first) / count));
  const between = last - first < count / 2 ? [1, 2, 5] : last - first < count * 0.8 ? [1, 3] : [1];
  const found = [];
  for (let n = first; n <= last; n += by) for (const each of between) found.push(each * 10 ** n);
  const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return inside.length > 1 ? inside : ticks(low, high, count).filter((value) => value > 0);
}

function scaleOf(low, high, log, from, to) {
  const curve = log ? Math.log : (value) => value;
  const a = curve(low), b = curve(high);
  return (value) => from + (to - from) * (b > a ? (curve(value) - a) / (b - a) : 0.5);
}

const tip = document.getElementById("tip");

/* Show the tip near a place on the screen, on the side where there is room. */
function showTip(x, y, title, rows) {
  tip.replaceChildren(element("b", {}, title));
  for (const [name, value, kind] of rows) {
    const left = kind ? element("span", {}, element("i", { class: `key ${kind}` }), name) : name;
    tip.append(element("div", {}, left, element("span", {}, value)));
  }
  tip.hidden = false;
  const wide = document.documentElement.clientWidth;
  const left = x + 14 + tip.offsetWidth > wide ? x - 14 - tip.offsetWidth : x + 14;
  tip.style.left = `${Math.max(4, Math.min(left, wide - tip.offsetWidth - 4)) + window.scrollX}px`;
  tip.style.top = `${Math.max(4, y - tip.offsetHeight - 8) + window.scrollY}px`;
}

const hideTip = () => { tip.hidden = true; };

/* Draw now and again whenever the box changes its width. */
function whenResized(box, draw) {
  let width = box.clientWidth;
  draw();
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (box.clientWidth && Math.abs(box.clientWidth - width) > 1) {
      width = box.clientWidth;
      draw();
    }
  })).observe(box);
}

/* A chart in `box`; `describe()` gives what to draw, anew for each drawing:
   {label, height, x: {name, log, form, labels, low, high}, y: {name, log, form, low, high, zero},
    bands: [[from, to, name]], series: [{name, kind, points, faint, dashed, dots, silent}]} */
function chart(box, describe) {
  const draw = () => drawChart(box, describe());
  whenResized(box, draw);
  return draw;
}

function extent(values, given) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) [low, high] = [0, 1];
  if (low === high && given.log) [low, high] = [low / 2, high * 2];
  else if (low === high && given.zero && low) high = low + Math.abs(low);
  else if (low === high) [low, high] = given.zero ? [0, 1] : [low - 0.5, high + 0.5];
  if (!given.log && !given.tight) {
    const room = (high - low) * 0.05;
    high += room;
    if (low < 0) low -= room;
  }
  return [given.low ?? low, given.high ?? high];
}

function drawChart(box, spec) {
  const width = box.clientWidth || 640, narrow = width < 560;
  const height = spec.height || (narrow ? 260 : 360);
  const { x, y } = spec;
  const series = spec.series.map((each) => ({
    ...each,
    points: each.points.filter(([a, b]) => a !== null && b !== null
      && (!x.log || a > 0) && (!y.log || b > 0)),
  })).filter((each) => each.points.length);
  const all = series.flatMap((each) => each.points);
  const [x0, x1] = extent(all.map((point) => point[0]), { tight: true, ...x });
  let [y0, y1] = extent(all.map((point) => point[1]), y);
  if (y.zero) [y0, y1] = [Math.min(0, y0), Math.max(0, y1)];
  const rows = (y.log ? logTicks : ticks)(y0, y1, Math.max(3, height / 60));
  if (!y.log && rows.length && y.low === undefined && y.form !== "signed") y0 = Math.min(y0, rows[0]);
  const named = series.filter((each) => each.name && !each.silent);
  const late = named.every((each) => each.points.at(-1)[0] > x1 - 0.04 * (x1 - x0));
  const ends = !narrow && named.length < 6 && !spec.small && late;
  const text = (name) => (name.length > 18 ? `${name.slice(0, 17)}…` : name);
  const whole = y.form === "signed" && rows.every(Number.isInteger);
  const form = whole ? (value) => forms.signed(value).slice(0, -2) : forms[y.form];
  const left = 10 + 7.2 * Math.max(...rows.map((value) => form(value).length), 1);
  const right = ends ? 14 + 7.4 * Math.max(...named.map((each) => text(each.name).length), 1) : 10;
  const top = (y.name ? 26 : 10) + (spec.bands?.length ? 16 : 0), bottom = height - (x.name ? 42 : 22);
  const across = scaleOf(x0, x1, x.log, left, width - right);
  const up = scaleOf(y0, y1, y.log, bottom, top);

  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0,
    "aria-label": spec.label });
  for (const [from, to, name] of spec.bands || []) {
    const a = across(from), b = across(to);
    if (name === "mid") shape("rect", { class: "band", x: a, y: top, width: b - a,
      height: bottom - top }, svg);
    shape("text", { class: "band-name", x: (a + b) / 2, y: top - 5, "text-anchor": "middle" },
      svg, narrow ? name : `${name} resource`);
  }
  for (const value of rows) {
    if (up(value) < top - 1 || up(value) > bottom + 1) continue;
    shape("line", { class: value === 0 && y.zero ? "base" : "grid", x1: left, x2: width - right,
      y1: up(value), y2: up(value) }, svg);
    shape("text", { x: left - 7, y: up(value) + 4, "text-anchor": "end" }, svg, form(value));
  }
  if (y.mark) shape("text", { x: width - right, "text-anchor": "end",
    y: up(0) + 15 > bottom ? up(0) - 6 : up(0) + 15 }, svg, y.mark);
  if (y.name) shape("text", { x: 0, y: 12 }, svg, y.name);
  if (x.name) shape("text", { x: (left + width - right) / 2, y: height - 4,
    "text-anchor": "middle" }, svg, x.name);
  columns(svg, x, x0, x1, across, bottom, (width - right - left));

  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  shape("rect", { x: left - 4, y: top - 4, width: Math.max(0, width - right - left + 8),
    height: bottom - top + 8 }, shape("clipPath", { id: clip }, shape("defs", {}, svg)));
  const inside = shape("g", { "clip-path": `url(#${clip})` }, svg);
  for (const each of series) {
    const kind = `${each.kind || ""}${each.faint ? " faint" : ""}${each.dashed ? " dashed" : ""}`;
    const places = each.points.map(([a, b]) => [+across(a).toFixed(1), +up(b).toFixed(1)]);
    if (!each.only) shape("path", { class: `curve ${kind}`,
      d: places.map(([a, b], n) => `${n ? "L" : "M"}${a} ${b}`).join("") }, inside);
    if (each.dots || each.only || places.length === 1)
      for (const [a, b] of places) shape("circle", { class: `dot ${kind}`, cx: a, cy: b,
        r: each.dots || 2.5 }, inside);
  }
  if (ends) endLabels(svg, named, width - right + 8, up, top, bottom, text);
  const legend = element("div", { class: "legend" });
  if (!ends && named.length && !spec.small) for (const each of named) legend.append(
    element("span", {}, element("i", { class: `key ${each.kind || ""}` }), each.name));
  box.replaceChildren(legend, svg);
  follow(svg, spec, series.filter((each) => !each.mute), across, up, top, bottom, width);
}

/* The labels below: languages where there is room for them, or round numbers. */
function columns(svg, x, x0, x1, across, bottom, room) {
  const put = (value, text) => shape("text", { x: across(value), y: bottom + 17,
    "text-anchor": "middle" }, svg, text);
  if (x.labels) {
    const by = Math.max(1, Math.ceil(x.labels.length / (room / 34)));
    for (let n = 0; n < x.labels.length; n += by) put(n + (x.first || 0), x.labels[n]);
  } else {
    const time = x.form === "duration";
    const found = ticks(x0, x1, Math.max(2, room / 90), time);
    for (const value of found) put(value, forms[x.form](value));
  }
}

/* The name of each curve at its right end, moved apart where they would overlap. */
function endLabels(svg, named, left, up, top, bottom, text) {
  const labels = named.map((each) => ({ each, y: up(each.points.at(-1)[1]) }))
    .sort((a, b) => a.y - b.y);
  for (let n = 1; n < labels.length; n++) labels[n].y = Math.max(labels[n].y, labels[n - 1].y + 15);
  let floor = bottom;
  for (const label of labels.reverse()) {
    label.y = Math.max(top, Math.min(label.y, floor));
    floor = label.y - 15;
    shape("text", { class: `end ${label.each.kind || ""}`, x: left, y: label.y + 4 }, svg,
      text(label.each.name));
  }
}

/* The rule, the points and the tip under the pointer; arrow keys do the same. */
function follow(svg, spec, series, across, up, top, bottom, width) {
  if (!series.length) return;
  const layer = shape("g", {}, svg);
  const keys = series.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points;
  let at = -1;
  const show = (place) => {
    layer.replaceChildren();
    let rule = null;
    const rows = [];
    for (const each of series) {
      const near = each.points.reduce((a, b) =>
        (Math.abs(across(b[0]) - place) < Math.abs(across(a[0]) - place) ? b : a));
      if (Math.abs(across(near[0]) - place) > Math.max(12, width / 40)) continue;
      if (!rule || Math.abs(across(near[0]) - place) < Math.abs(across(rule[0]) - place)) rule = near;
      if (up(near[1]) >= top - 4) shape("circle", { class: `focus ${each.kind || ""}`,
        cx: across(near[0]), cy: up(near[1]), r: 4.5 }, layer);
      rows.push([each.says || each.name || "", forms[spec.y.form](near[1]), each.kind || "none"]);
    }
    if (!rule) return clear();
    const x = across(rule[0]);
    layer.prepend(shape("line", { class: "rule", x1: x, x2: x, y1: top, y2: bottom }));
    const frame = svg.getBoundingClientRect(), zoom = frame.width / width;
    showTip(frame.left + x * zoom, frame.top + (top + 30) * zoom, spec.title(rule[0]), rows);
  };
  const clear = () => { layer.replaceChildren(); hideTip(); at = -1; };
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    show((event.clientX - frame.left) * (width / frame.width));
  });
  svg.addEventListener("pointerleave", clear);
  svg.addEventListener("blur", clear);
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") clear();
    if (!by) return;
    event.preventDefault();
    at = Math.max(0, Math.min(keys.length - 1, at + by));
    show(across(keys[at][0]));
  });
}
