/* The experts' shares as a table of coloured cells: languages across, experts down. */

function showHeat() {
  const place = get("heat");
  if (!place) return;
  let run = data.experts[0], side = Object.keys(run.sides)[0], layer = 0;
  let into = data.tasks.some((task) => task.into);
  const columns = () => Object.entries(run.sides[side])
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
  const percent = (share) => `${(share / 100).toFixed(1)}%`;

  let shown = [];
  const draw = () => {
    shown = columns();
    const top = topOf(), rows = shown[0]?.shares.length || 0;
    const by = Math.ceil(12 * shown.length / (place.clientWidth || 640));  // columns of a label
    const head = made("tr", {}, made("th", { scope: "col" }), ...shown.map(({ task }, n) =>
      made("th", { scope: "col" }, made("span", n % by ? { hidden: "" } : {}, task.language))));
    const body = made("tbody", {});
    for (let e = 0; e < rows; e++)
      body.append(made("tr", {}, made("th", { scope: "row", "aria-label": expertName(e) },
        String(e * run.together + 1)), ...shown.map(({ shares }) => made("td",
        { style: `--v:${Math.min(100, 100 * shares[e] / top).toFixed(0)}%` }, percent(shares[e])))));
    const tall = Math.max(3, Math.min(24, Math.floor(440 / Math.max(1, rows))));
    place.replaceChildren(made("table", { class: `heat${tall < 12 ? " dense" : ""}`,
      style: `--tall:${tall}px;min-width:${7 * shown.length}px` }, made("thead", {}, head), body));
    showScale(top);
  };
  const showScale = (top) => {
    const at = (share, text) => made("b", { style: `left:${100 * share / top}%` }, text);
    get("heat-scale").replaceChildren(made("i", {}), made("span", {}, at(0, "0"),
      at(even(), `even: ${percent(even())}`), at(top, `${percent(top)} or more`)));
  };

  place.addEventListener("pointermove", (event) => {
    const cell = event.target.closest("td");
    if (!cell) return hideTip();
    const { task, shares } = shown[cell.cellIndex - 1], e = cell.parentElement.sectionRowIndex;
    const box = cell.getBoundingClientRect();
    showTip(box.right, box.top, taskName(task), [[expertName(e), `${percent(shares[e])} of choices`],
      ["against an even share", `${(shares[e] / even()).toFixed(2)} ×`]]);
  });
  place.addEventListener("pointerleave", hideTip);

  const fillControls = () => {
    const controls = get("heat-controls");
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
  draw();
}

showHeat();
