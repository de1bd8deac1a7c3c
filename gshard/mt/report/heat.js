/* The heat map of experts: languages across, most training text first; experts down. */

function drawHeat() {
  const place = box("heat-chart");
  if (!place) return;
  let run = data.experts[0], side = Object.keys(run.sides)[0], layer = 0;
  let into = data.tasks.some((task) => task.into);
  const controls = box("heat-controls"), table = box("heat-table");

  /* What is shown now: tasks in order with the share of each expert. */
  const columnsNow = () => Object.entries(run.sides[side])
    .filter(([n]) => !bothWays || data.tasks[n].into === into)
    .map(([n, layers]) => ({ task: data.tasks[n], shares: layers[layer] || layers[0] }));
  const expertName = (n) => (run.together === 1 ? `expert ${n + 1}`
    : `experts ${n * run.together + 1} to ${Math.min((n + 1) * run.together, run.experts)}`);
  const even = () => 10000 * run.together / run.experts;

  /* The scale ends at a share that hardly any cell exceeds, the same for all layers of a run. */
  const topOf = () => {
    const all = Object.values(run.sides).flatMap((tasks) => Object.values(tasks).flat(2));
    all.sort((a, b) => a - b);
    return Math.max(2 * even(), all[Math.floor(0.998 * (all.length - 1))] || 0);
  };

  const draw = () => {
    const columns = columnsNow(), top = topOf();
    const rows = columns[0]?.shares.length || 0, width = place.clientWidth || 640;
    const left = 34, head = 6, cell = (width - left - 2) / Math.max(1, columns.length);
    const tall = Math.max(3, Math.min(24, Math.floor(440 / Math.max(1, rows))));
    const height = head + rows * tall + 40;
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0,
      "aria-label": `Share of the choices of each of ${run.experts} experts in MoE layer `
        + `${layer + 1} of the ${side}, by language` });
    const gap = cell > 5 && tall > 5 ? 0.6 : 0;
    columns.forEach(({ shares }, n) => shares.forEach((share, e) => {
      const heat = Math.min(100, 100 * share / top).toFixed(0);
      shape("rect", { class: "cell", style: `--v:${heat}%`, x: (left + n * cell).toFixed(2),
        y: head + e * tall, width: Math.max(0.5, cell - gap).toFixed(2), height: tall - gap }, svg);
    }));
    const every = Math.max(1, Math.ceil(14 / tall));
    for (let e = 0; e < rows; e += every) shape("text", { x: left - 7,
      y: head + e * tall + tall / 2 + 4, "text-anchor": "end" }, svg, e * run.together + 1);
    const by = Math.max(1, Math.ceil(34 / cell));
    for (let n = 0; n < columns.length; n += by) shape("text", { x: left + (n + 0.5) * cell,
      y: head + rows * tall + 16, "text-anchor": "middle" }, svg, columns[n].task.language);
    shape("text", { x: left + (width - left) / 2, y: height - 4, "text-anchor": "middle" }, svg,
      "languages, most training pairs first");
    place.replaceChildren(svg);
    drawScale(top);
    if (table.open) fillTable();
    pointAt(svg, columns, { left, head, cell, tall, width, rows });
  };

  const drawScale = (top) => {
    const at = (share, text) => {
      const mark = element("b", {}, text);
      mark.style.left = `${100 * share / top}%`;
      return mark;
    };
    box("heat-scale").replaceChildren(element("i", {}), element("span", {}, at(0, "0"),
      at(even(), `even: ${forms.share(even() / 10000)}`),
      at(top, `${forms.share(top / 10000)} or more`)));
  };

  const pointAt = (svg, columns, { left, head, cell, tall, width, rows }) => {
    const mark = shape("rect", { class: "chosen", visibility: "hidden" }, svg);
    let n = -1, e = 0;
    const clear = () => { mark.setAttribute("visibility", "hidden"); hideTip(); };
    const show = () => {
      if (!columns[n] || e < 0 || e >= rows) return clear();
      const share = columns[n].shares[e], x = left + n * cell, y = head + e * tall;
      const set = { x, y, width: cell, height: tall, visibility: "visible" };
      for (const [key, value] of Object.entries(set)) mark.setAttribute(key, value);
      const frame = svg.getBoundingClientRect(), zoom = frame.width / width;
      showTip(frame.left + (x + cell / 2) * zoom, frame.top + y * zoom, taskName(columns[n].task),
        [[expertName(e), `${(share / 100).toFixed(1)}% of choices`],
          ["against an even share", `${(share / even()).toFixed(2)} ×`]]);
    };
    svg.addEventListener("pointermove", (event) => {
      const frame = svg.getBoundingClientRect(), zoom = width / frame.width;
      n = Math.floor(((event.clientX - frame.left) * zoom - left) / cell);
      e = Math.floor(((event.clientY - frame.top) * zoom - head) / tall);
      show();
    });
    svg.addEventListener("pointerleave", clear);
    svg.addEventListener("blur", clear);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
      if (event.key === "Escape") clear();
      if (!step[event.key]) return;
      event.preventDefault();
      n = Math.max(0, Math.min(columns.length - 1, n + step[event.key][0]));
      e = Math.max(0, Math.min(rows - 1, e + step[event.key][1]));
      show();
    });
  };

  /* The same numbers as a table, made when it is asked for: it is large. */
  const fillTable = () => {
    const columns = columnsNow(), rows = columns[0]?.shares.length || 0;
    const head = element("tr", {}, element("th", { scope: "col" }, "Language"));
    for (let e = 0; e < rows; e++) head.append(element("th", { scope: "col" }, expertName(e)));
    const body = element("tbody", {});
    for (const { task, shares } of columns) {
      const line = element("tr", {}, element("th", { scope: "row" }, taskName(task)));
      for (const share of shares) line.append(element("td", {}, `${(share / 100).toFixed(1)}%`));
      body.append(line);
    }
    table.querySelector(".wide").replaceChildren(
      element("table", {}, element("thead", {}, head), body));
  };
  table.addEventListener("toggle", () => { if (table.open) fillTable(); });

  const fillControls = () => {
    controls.replaceChildren();
    choice(controls, "Model", data.experts.map((each) => [each.run, data.runs[each.run]]), run.run,
      (value) => {
        run = data.experts.find((each) => each.run === value);
        if (!run.sides[side]) side = Object.keys(run.sides)[0];
        fillControls();
        draw();
      });
    choice(controls, "Side", Object.keys(run.sides).map((each) => [each, each]), side, (value) => {
      side = value;
      fillControls();
      draw();
    });
    const layers = (Object.values(run.sides[side])[0] || []).length;
    layer = Math.min(layer, Math.max(0, layers - 1));
    choice(controls, "MoE layer", Array.from({ length: layers }, (_, n) => [n, String(n + 1)]),
      layer, (value) => { layer = value; draw(); });
    if (bothWays) choice(controls, "Direction", directions, into,
      (value) => { into = value; draw(); });
  };
  fillControls();
  whenResized(place, draw);
}
