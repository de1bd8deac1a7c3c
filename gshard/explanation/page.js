/* The explain page: choose a line, an operator or a tensor; sums, search, order, memory. */

const data = JSON.parse(document.getElementById("numbers").textContent);
const get = (id) => document.getElementById(id);
const FIELDS = ["seconds", "sent", "line", "called", "layer", "reason", "name", "kind", "count",
  "group", "bound", "shape", "value", "loops"];
const NUMBERS = ["seconds", "sent", "count", "group"];
const read = (row) => Object.fromEntries(row.map((cell, n) =>
  [FIELDS[n], NUMBERS.includes(FIELDS[n]) ? cell : data.texts[cell]]));
const operators = data.operators.map(read);
/* A collective that combines values counts at the line and in the layer of each of them. */
const values = operators.flatMap((op, n) =>
  (data.members[n] || [[]]).map((member) => ({ ...op, ...read(member), operator: n })));
const at = new Map();
values.forEach((value) => at.set(value.line, [...(at.get(value.line) || []), value]));

const size = (n) => {
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (n < 1000) return `${+n.toPrecision(3)} ${unit}`;
    n /= 1000;
  }
  return `${+n.toPrecision(4)} TB`;
};
const time = (s) => s >= 1 ? `${+s.toPrecision(3)} s` : s >= 1e-3 ? `${+(s * 1e3).toPrecision(3)} ms`
  : s >= 1e-6 ? `${+(s * 1e6).toPrecision(3)} us` : `${+(s * 1e9).toPrecision(3)} ns`;
const add = (ops, field) => ops.reduce((sum, op) => sum + op[field], 0);

/* The drawer at the bottom: what was chosen, in words. */
const choose = (line, title, words) => {
  document.querySelectorAll(".chosen").forEach((each) => each.classList.remove("chosen"));
  const row = document.querySelector(`.src[data-line="${CSS.escape(line)}"]`);
  row?.classList.add("chosen");
  get("detail").querySelector("div").replaceChildren(
    made("b", {}, title), ...words.filter(Boolean).map((text) => made("p", {}, text)));
  get("detail").hidden = false;
  return row;
};
const told = (op) => {
  const runs = op.count > 1 ? `, ${op.count.toLocaleString("en")} runs` : "";
  const sent = op.sent ? `, each device sends ${size(op.sent)} to ${op.group} devices` : "";
  const why = op.reason ? ` (because: ${op.reason})` : "";
  return `${op.kind || op.name} ${op.value} ${op.shape}: ${time(op.seconds)}${runs}${sent}${why}`;
};
const chooseLine = (line, scroll) => {
  const ops = (at.get(line) || []).slice().sort((a, b) => b.seconds - a.seconds);
  const rest = ops.length - 8;
  const row = choose(line, ops.length
    ? `${line}: ${time(add(ops, "seconds"))}, ${size(add(ops, "sent"))} sent`
    : `${line}: nothing runs here`,
  [data.why[line], ...ops.slice(0, 8).map(told), rest > 0 ? `and ${rest} more operators` : ""]);
  if (row && scroll) {
    row.closest("details").open = true;
    row.scrollIntoView({ block: "center" });
  }
};
get("close").onclick = () => { get("detail").hidden = true; };
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") get("detail").hidden = true;
});

/* Rows that Enter chooses too, and arrows walk through. */
const choosable = (row, act) => {
  row.tabIndex = 0;
  row.addEventListener("click", act);
  row.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const list = row.closest("#ops, .lines, #grids, tbody");
    const rows = [...list.querySelectorAll("[tabindex='0'], summary")].filter((each) =>
      each.checkVisibility());
    rows[rows.indexOf(row) + step]?.focus();
  });
};
document.querySelectorAll(".src.runs").forEach((row) =>
  choosable(row, () => chooseLine(row.dataset.line, false)));
document.querySelectorAll(".go").forEach((each) =>
  each.addEventListener("click", () => chooseLine(each.dataset.line, true)));

/* Tensors: a small grid of tiles each, coloured and numbered by device. */
for (const value of data.tensors) {
  const [height, width] = [value.cells.length, value.cells[0].length];
  const unit = Math.max(2, Math.min(22, Math.floor(150 / Math.max(width, height))));
  const canvas = made("canvas", { width: width * unit, height: height * unit });
  const pen = canvas.getContext("2d");
  pen.font = "10px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  value.cells.forEach((row, y) => row.forEach((device, x) => {
    pen.fillStyle = device < 0 ? "#9aa3ad88" : `hsl(${device * 300 / data.devices} 52% 62%)`;
    pen.fillRect(x * unit, y * unit, unit - (unit > 5), unit - (unit > 5));
    if (unit < 16) return;
    pen.fillStyle = "#10151b";
    pen.fillText(device < 0 ? "all" : device, (x + .5) * unit, (y + .5) * unit);
  }));
  const box = made("div", { class: "tensor", role: "button" }, made("b", {}, value.name), canvas,
    made("span", { class: "code quiet" }, value.shape), made("span", { class: "quiet" }, value.words));
  choosable(box, () => {
    const row = choose(value.line, `${value.name} ${value.shape}`, [value.words, value.line]);
    row?.scrollIntoView({ block: "nearest" });
    box.classList.add("chosen");
  });
  get("grids").append(box);
}

/* A part that is made when it is first unfolded. */
const whenOpened = (id, make) => {
  const fold = get(id);
  let done = false;
  const open = () => { if (fold.open && !done) { done = true; make(); } };
  fold.addEventListener("toggle", open);
  open();
};

whenOpened("sums", () => {
  const keys = { line: "line", called: "function", layer: "layer (named_scope)", kind: "collective",
    bound: "bound by" };
  for (const [key, name] of Object.entries(keys))
    if (values.some((op) => op[key])) get("sum-by").append(made("option", { value: key }, name));
  let order = "seconds";
  const draw = () => {
    const key = get("sum-by").value, wanted = get("sum-find").value.toLowerCase();
    const groups = new Map();
    for (const op of values) {
      if (get("sum-sent").checked && !op.sent) continue;
      groups.set(op[key], [...(groups.get(op[key]) || []), op]);
    }
    const rows = [...groups].map(([name, ops]) => ({ name: name || "none", seconds: add(ops, "seconds"),
      sent: add(ops, "sent"), count: new Set(ops.map((op) => op.operator)).size }))
      .filter((row) => row.name.toLowerCase().includes(wanted));
    rows.sort((a, b) => order === "name" ? a.name.localeCompare(b.name) : b[order] - a[order]);
    const head = made("tr", {});
    for (const [field, title] of [["name", keys[key]], ["seconds", "time"], ["sent", "sent"],
      ["count", "operators"]]) {
      const button = made("button", { type: "button" }, title);
      button.onclick = () => { order = field; draw(); };
      head.append(made("th", field === order ? { "aria-sort": "descending" } : {}, button));
    }
    const total = data.seconds || 1;
    get("sum-table").tHead.replaceChildren(head);
    get("sum-table").tBodies[0].replaceChildren(...rows.map((row) => {
      const part = `${time(row.seconds)} (${(100 * row.seconds / total).toFixed(0)}%)`;
      const made_row = made("tr", {}, made("td", {}, row.name), made("td", {}, part),
        made("td", {}, row.sent ? size(row.sent) : ""), made("td", {}, row.count.toLocaleString("en")));
      if (key === "line") choosable(made_row, () => chooseLine(row.name, true));
      return made_row;
    }));
    get("sum-found").textContent =
      `${rows.length} rows, ${time(add(rows, "seconds"))}, ${size(add(rows, "sent"))} sent in all`;
  };
  for (const id of ["sum-by", "sum-find", "sum-sent"]) get(id).addEventListener("input", draw);
  draw();
});

whenOpened("program", () => {
  const rowOf = (op, depth) => {
    const row = made("div", { class: `op${op.kind ? " sends" : ""}`, role: "listitem" },
      made("span", {}, time(op.seconds)), made("span", {}, op.sent ? size(op.sent) : op.bound),
      made("span", { style: `padding-left:${depth}em` }, op.kind || op.name),
      made("span", { title: op.value }, op.value), made("span", {}, op.shape),
      made("span", {}, op.line));
    choosable(row, () => { chooseLine(op.line, false); row.classList.add("chosen"); });
    return row;
  };
  /* A loop folds; folded or not, its head says what all of it takes and sends. */
  const loopOf = (name, depth, open) => {
    const head = made("summary", { style: `padding-left:${depth}em` }, name);
    const fold = made("details", { class: "loop" }, head);
    fold.open = open;
    fold.ops = [];
    fold.sum = () => {
      const sent = add(fold.ops, "sent");
      const about = `${fold.ops.length} operators, ${time(add(fold.ops, "seconds"))}`;
      head.append(made("span", { class: "quiet" }, `${about}${sent ? `, ${size(sent)} sent` : ""}`));
    };
    return fold;
  };
  const foldAll = (open) => get("ops").querySelectorAll("details").forEach((fold) => {
    fold.open = open;
  });
  get("fold").onclick = () => foldAll(false);
  get("unfold").onclick = () => foldAll(true);
  for (const id of ["fold", "unfold"]) get(id).hidden = !operators.some((op) => op.loops);
  const draw = () => {
    const wanted = get("op-find").value.toLowerCase(), order = get("op-order").value;
    const shown = operators.filter((op) => (!get("only").checked || op.kind)
      && `${op.name} ${op.kind} ${op.line} ${op.value} ${op.shape} ${op.layer}`.toLowerCase().includes(wanted));
    if (order) shown.sort((a, b) => b[order] - a[order]);
    const top = document.createDocumentFragment();
    const unfolded = shown.length <= 300;  // more are easier to survey folded
    let open = [], folds = [top];
    for (const op of shown) {
      const loops = order || !op.loops ? [] : op.loops.split(" > ");
      let same = 0;
      while (same < open.length && open[same] === loops[same]) same++;
      folds = folds.slice(0, same + 1);
      for (const name of loops.slice(same)) {
        const fold = loopOf(name, folds.length, unfolded);
        folds.at(-1).append(fold);
        folds.push(fold);
      }
      open = loops;
      for (const fold of folds.slice(1)) fold.ops.push(op);
      folds.at(-1).append(rowOf(op, loops.length));
    }
    top.querySelectorAll("details").forEach((fold) => fold.sum());
    get("ops").replaceChildren(top);
    get("op-found").textContent = `${shown.length} of ${operators.length}`;
  };
  for (const id of ["op-order", "op-find", "only"]) get(id).addEventListener("input", draw);
  draw();
});

whenOpened("memory", () => follow(get("memory-chart"), data.memory.map((bytes, n) => {
  const line = data.texts[data.memory_lines[n]];
  return { at: (n + .5) / data.memory.length, title: size(bytes),
    rows: [[`operator ${n + 1} of ${data.memory.length}`, line]],
    choose: () => chooseLine(line, true) };
})));
