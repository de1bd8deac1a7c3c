/* The report: what is under the pointer of a chart, its switches, sorting, search, translations. */

const data = JSON.parse(document.getElementById("numbers").textContent);
const get = (id) => document.getElementById(id);
const colour = (run) => `var(--s${run % data.colours})`;

function short(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]])
    if (Math.abs(value) >= 0.9995 * size || size === 1) return +(value / size).toPrecision(3) + letter;
}
function duration(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const [unit, size] = units.find(([, each]) => seconds >= 2 * each) || units[3];
  return `${+(seconds / size).toPrecision(3)} ${unit}`;
}

const languageNames = (() => {
  try { return new Intl.DisplayNames(["en"], { type: "language", fallback: "code" }); }
  catch { return { of: (code) => code }; }
})();

function languageName(code) {
  try { return languageNames.of(code.replaceAll("_", "-")) || code; } catch { return code; }
}

const bothWays = new Set(data.tasks.map((task) => task.into)).size > 1;

/* "German (de)", and with the direction where there are two. */
function taskName(task) {
  const name = languageName(task.language);
  if (bothWays) return `${name} (${task.task})`;
  return name === task.language ? name : `${name} (${task.language})`;
}

/* Buttons of which one is pressed. `options` are [value, text]; one alone needs no buttons. */
function choice(place, title, options, chosen, act) {
  if (!place || options.length < 2) return;
  const group = made("div", { class: "choice", role: "group", "aria-label": title },
    made("span", {}, title));
  for (const [value, text] of options) {
    const button = made("button", { type: "button", "aria-pressed": value === chosen,
      "data-choice": value }, text);
    button.addEventListener("click", () => {
      for (const each of group.querySelectorAll("button"))
        each.setAttribute("aria-pressed", each === button);
      act(value);
    });
    group.append(button);
  }
  place.append(group);
}

const directions = [[true, "into English"], [false, "from English"]];

/* Charts of one figure, of which one is shown, by the name of its variant. */
const variants = (id) => new Map([...document.querySelectorAll(`#${id}-chart > [data-variant]`)]
  .map((holder) => [holder.dataset.variant, holder]));
const show = (holders, name) => {
  for (const [key, holder] of holders) holder.hidden = key !== name;
};
const chartIn = (holder) => holder.querySelector(".chart");

/* The point of a series that is nearest to x, if it is near enough to be meant. */
const nearest = (points, x, most) => {
  let best = null;
  for (const point of points)
    if (point[1] !== null && (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x))) best = point;
  return best && Math.abs(best[0] - x) <= most ? best : null;
};

function followCorpora() {
  const box = get("corpora");
  if (!box) return;
  const ranks = Math.max(...data.corpora.map((corpus) => corpus.pairs.length));
  follow(box, Array.from({ length: ranks }, (_, n) => ({
    at: along(box, n + 1), title: `${n + 1}.`,
    rows: data.corpora.filter((corpus) => corpus.pairs[n]).map((corpus, c) => {
      const [code, count] = corpus.pairs[n];
      return [`${languageName(code)} (${code})`, `${count.toLocaleString("en")} pairs`, colour(c)];
    }),
  })));
}

function followLoss() {
  const holders = variants("loss");
  for (const [clock, holder] of holders) {
    const box = chartIn(holder), scale = +holder.dataset.scale;
    const series = data.loss.flatMap((run, n) => [["train", run.train, "smooth"], ["dev", run.dev, "nll"]]
      .map(([kind, side, field]) => ({ name: `${data.runs[n]}, ${kind}`, colour: colour(n),
        points: side[clock].map((x, i) => [x, side[field][i]]).filter((point) => point[0] !== null) })));
    const longest = series.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points;
    const most = scale * (box.dataset.high - box.dataset.low) / 40;
    follow(box, longest.map(([x]) => ({
      at: along(box, x / scale),
      title: clock === "seconds" ? duration(x) : `${short(x)} ${holder.dataset.title}`,
      rows: () => series.flatMap((each) => {
        const near = nearest(each.points, x, most);
        return near ? [[each.name, near[1].toFixed(2), each.colour]] : [];
      }),
    })));
  }
  choice(get("loss-controls"), "Over", [...holders].map(([key, each]) => [key, each.dataset.title]),
    [...holders.keys()][0], (key) => show(holders, key));
}

function followQuality() {
  const holders = variants("quality");
  if (!holders.size) return;
  const signed = (value) => `${value > 0 ? "+" : value < 0 ? "\u2212" : ""}${Math.abs(value).toFixed(1)}`;
  for (const [key, holder] of holders) {
    const [measure, into] = key.split(" "), box = chartIn(holder);
    const text = measure === "delta" ? signed : (value) => value.toFixed(1);
    const places = data.tasks.map((_, n) => n).filter((n) => data.tasks[n].into === (into === "1"));
    follow(box, places.map((place, n) => ({
      at: along(box, n),
      title: `${taskName(data.tasks[place])}, ${(data.tasks[place].pairs || 0).toLocaleString("en")} pairs`,
      rows: data.quality.flatMap((run) => [[measure, ""], [`${measure}_smooth`, ", smoothed"],
        ...(measure === "bleu" ? [["baseline", ", baseline"], ["copy", ", copy of source"]] : [])]
        .filter(([field]) => run[field][place] !== null).map(([field, how]) =>
          [`${data.runs[run.run]}${how}`, text(run[field][place]), colour(run.run)])),
    })));
  }
  let [measure, into] = [...holders.keys()][0].split(" ");
  const update = () => show(holders, `${measure} ${into}`);
  const has = (part, n) => [...new Set([...holders.keys()].map((key) => key.split(" ")[n]))]
    .filter((value) => part[value]).map((value) => [value, part[value]]);
  choice(get("quality-controls"), "Show", has({ delta: "ΔBLEU", bleu: "BLEU" }, 0), measure,
    (value) => { measure = value; update(); });
  choice(get("quality-controls"), "Direction", has({ 1: "into English", 0: "from English" }, 1), into,
    (value) => { into = value; update(); });
}

function followHealth() {
  const forms = { share: (value) => `${+(100 * value).toFixed(1)}%`, short, number: (value) =>
    String(+value.toPrecision(3)), fixed: (value) => value.toFixed(2), whole: String };
  for (const each of data.health) {
    const box = get(`health-${each.name}`);
    const longest = each.series.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points;
    const most = (box.dataset.high - box.dataset.low) / 40;
    follow(box, longest.map(([step]) => ({ at: along(box, step), title: `step ${step.toLocaleString("en")}`,
      rows: () => each.series.flatMap((run) => {
        const near = nearest(run.points, step, most);
        return near ? [[data.runs[run.run], forms[each.form](near[1]), colour(run.run)]] : [];
      }) })));
  }
}

/* Every sortable table: click a head to sort by it, again to turn the order round. */
function sortTables() {
  for (const span of document.querySelectorAll("[data-language]")) {
    const code = span.dataset.language, name = languageName(code);
    span.textContent = name;
    if (!span.nextElementSibling && name !== code) span.after(" ", made("small", {}, code));
    span.closest("th").dataset.value = name;
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, n) => head.querySelector("button").addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const first = head.classList.contains("text") ? "ascending" : "descending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = before === first ? other : first;
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const value = (row) => row.cells[n].dataset.value;
      body.append(...[...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        const by = isNaN(x) || isNaN(y) ? x.localeCompare(y, "en") : x - y;
        return sign * by;
      }));
    }));
  }
}

function searchTables() {
  const search = get("language-search");
  if (!search) return;
  const panels = [...document.querySelectorAll(".panel")];
  const options = panels.map((panel) => [panel.id, panel.dataset.title]);
  const choose = (id) => { for (const panel of panels) panel.hidden = panel.id !== id; };
  choose(panels[0].id);
  choice(get("language-controls"), "Show", options, panels[0].id, choose);
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    let found = 0;
    panels.forEach((panel, n) => {
      for (const row of panel.querySelectorAll("tbody tr")) {
        row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
        if (!n && !row.hidden) found++;
      }
    });
    get("language-found").textContent = wanted ? `${found} found` : "";
  });
}

function showExamples() {
  const place = get("example-list");
  if (!place) return;
  const tasks = new Map(data.tasks.map((task) => [task.task, task]));
  const nameOf = (task) => (tasks.has(task) ? taskName(tasks.get(task)) : task);
  const known = [...new Set(data.examples.list.map((example) => example.task))];
  const select = get("example-task"), search = get("example-search"), more = get("example-more");
  for (const task of known.sort((a, b) => nameOf(a).localeCompare(nameOf(b), "en")))
    select.append(made("option", { value: task }, nameOf(task)));
  let shown = 10;
  const one = (example) => {
    const [source, target] = example.task.split("-");
    const text = (kind, language, words) => made("dd", { class: kind, lang: language,
      dir: "auto" }, words);
    const item = made("dl", { class: "example", "data-task": example.task },
      made("dt", { class: "from" }, nameOf(example.task)),
      text("source", source, example.source),
      made("dt", {}, "reference"), text("reference", target || "en", example.reference));
    for (const [run, words, score, chrf] of example.translations) {
      const name = made("dt", {}, made("i", { class: "key", style: `--c:${colour(run)}` }), data.runs[run]);
      if (score !== null) name.title = `score ${score}`;
      const said = words.trim() ? text("translated", target || "en", words)
        : made("dd", { class: "none" }, "(nothing)");
      if (chrf !== null) said.append(made("small", { dir: "ltr" }, `chrF++ ${chrf.toFixed(0)}`));
      item.append(name, said);
    }
    return item;
  };
  const draw = () => {
    const wanted = search.value.trim().toLowerCase();
    const found = data.examples.list.filter((example) =>
      (!select.value || example.task === select.value)
      && (!wanted || [example.source, example.reference, ...example.translations.map((t) => t[1])]
        .some((words) => words.toLowerCase().includes(wanted))));
    place.replaceChildren(...found.slice(0, shown).map(one));
    more.hidden = found.length <= shown;
    get("example-found").textContent = `${found.length} of ${data.examples.list.length}`;
  };
  select.addEventListener("change", () => { shown = 10; draw(); });
  search.addEventListener("input", () => { shown = 10; draw(); });
  more.addEventListener("click", () => { shown += 20; draw(); });
  draw();
}

sortTables();
searchTables();
followCorpora();
followLoss();
followQuality();
followHealth();
showExamples();
