/* What is under the pointer of a chart: a rule, and a tip with words; arrow keys do the same. */

const tip = document.getElementById("tip");

function made(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/* Show the tip near a place on the screen, on the side where there is room. */
function showTip(x, y, title, rows) {
  tip.replaceChildren(made("b", {}, title));
  for (const [name, value, colour] of rows) {
    const left = made("span", {}, name);
    if (colour) left.prepend(made("i", { class: "key", style: `--c:${colour}` }));
    tip.append(made("div", {}, left, made("span", {}, value)));
  }
  tip.hidden = false;
  const wide = document.documentElement.clientWidth;
  const left = x + 14 + tip.offsetWidth > wide ? x - 14 - tip.offsetWidth : x + 14;
  tip.style.left = `${Math.max(4, Math.min(left, wide - tip.offsetWidth - 4)) + window.scrollX}px`;
  tip.style.top = `${Math.max(4, y - tip.offsetHeight - 8) + window.scrollY}px`;
}

const hideTip = () => { tip.hidden = true; };

/* Where a value of the x axis is between the left and the right end of a chart: 0 to 1. */
function along(box, x) {
  const curve = box.dataset.log === "1" ? Math.log : (value) => value;
  const [low, high] = [box.dataset.low, box.dataset.high].map((end) => curve(+end));
  return (curve(x) - low) / (high - low);
}

/* Points of a chart, from left to right: {at: 0 to 1, title, rows, choose}. A click chooses one. */
function follow(box, points) {
  if (!box || !points.length) return;
  const rule = made("div", { class: "rule", hidden: "" });
  box.append(rule);
  let now = -1;
  const drawn = () => [...box.children].find((each) => each.dataset.left && each.clientWidth);
  const frame = () => {
    const each = drawn(), box = each.getBoundingClientRect();
    const zoom = box.width / each.firstElementChild.viewBox.baseVal.width;
    const left = box.left + each.dataset.left * zoom;
    return { left, width: box.right - each.dataset.right * zoom - left, top: box.top };
  };
  const show = (place) => {
    now = Math.max(0, Math.min(points.length - 1, place));
    const { left, width, top } = frame(), point = points[now], x = left + point.at * width;
    rule.hidden = false;
    rule.style.left = `${x - box.getBoundingClientRect().left}px`;
    showTip(x, top + 40, point.title, point.rows.call?.() ?? point.rows);
  };
  const clear = () => { hideTip(); rule.hidden = true; };
  const nearest = (event) => {
    const { left, width } = frame(), at = (event.clientX - left) / width;
    let best = 0;
    points.forEach((point, n) => {
      if (Math.abs(point.at - at) < Math.abs(points[best].at - at)) best = n;
    });
    return best;
  };
  box.addEventListener("pointermove", (event) => show(nearest(event)));
  box.addEventListener("pointerleave", clear);
  box.addEventListener("blur", clear);
  box.addEventListener("click", (event) => points[nearest(event)].choose?.());
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 }[event.key];
    if (event.key === "Escape") clear();
    if (event.key === "Enter" && now >= 0) points[now].choose?.();
    if (!by) return;
    event.preventDefault();
    show(now + by);
  });
}
