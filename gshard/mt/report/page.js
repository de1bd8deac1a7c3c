/* The sections of the page: what each chart shows, its switches, and the tables' sorting. */

const data = JSON.parse(document.getElementById("numbers").textContent);
const box = (id) => document.getElementById(id);
const kindOf = (run) => `s${run % 12}`;

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
  const group = element("div", { class: "choice", role: "group", "aria-label": title },
    element("span", {}, title));
  for (const [value, text] of options) {
    const button = element("button", { type: "button", "aria-pressed": value === chosen,
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

function drawCorpora() {
  if (!box("corpora")) return;
  const [first] = data.corpora;
  chart(box("corpora"), () => ({
    label: `Training pairs of ${first.pairs.length} languages, most first, on a log scale. `
      + `${languageName(first.pairs[0][0])} has ${forms.whole(first.pairs[0][1])}, `
      + `${languageName(first.pairs.at(-1)[0])} ${forms.whole(first.pairs.at(-1)[1])}.`,
    x: { name: "languages, by number of training pairs", first: 1, form: "whole",
      labels: first.pairs.map((pair) => pair[0]) },
    y: { name: "training pairs (log scale)", log: true, form: "short" },
    series: data.corpora.map((corpus, n) => ({
      name: data.corpora.length > 1 ? corpus.runs.join(", ") : "",
      says: "pairs", kind: kindOf(n), dots: 2.6,
      points: corpus.pairs.map((pair, rank) => [rank + 1, pair[1]]),
    })),
    title: (rank) => data.corpora.map((corpus) => corpus.pairs[rank - 1]).filter(Boolean)
      .map(([code, count]) => `${rank}. ${languageName(code)} (${code}): ${forms.whole(count)}`)
      .join("; "),
  }));
}

function drawLoss() {
  if (!box("loss-chart")) return;
  const clocks = { step: ["steps", "short"], tokens: ["target tokens", "short"],
    seconds: ["time of training", "duration"] };
  const known = Object.keys(clocks).filter((clock) =>
    data.loss.some((run) => run.train[clock].some((value) => value !== null)
      || run.dev[clock].some((value) => value !== null)));
  let clock = known.includes("tokens") ? "tokens" : known[0];
  const draw = chart(box("loss-chart"), () => {
    const series = [], settled = [];
    data.loss.forEach((run, n) => {
      const { train, dev } = run, kind = kindOf(n), name = data.runs[n];
      const points = (side, values) => values.map((value, i) => [side[clock][i], value]);
      series.push({ kind, faint: true, mute: true, points: points(train, train.raw) });
      series.push({ kind, name, says: `${name}, train`, points: points(train, train.smooth) });
      series.push({ kind, name: train.smooth.length ? "" : name, silent: train.smooth.length > 0,
        says: `${name}, dev`, dashed: true, dots: 3, points: points(dev, dev.nll) });
      settled.push(...train.smooth.slice(Math.floor(train.smooth.length / 12)), ...dev.nll);
    });
    const low = settled.reduce((a, b) => Math.min(a, b), Infinity);
    const high = settled.reduce((a, b) => Math.max(a, b), -Infinity);
    const [name, form] = clocks[clock];
    return {
      label: `Cross-entropy of ${data.runs.length} run${data.runs.length > 1 ? "s" : ""} over ${name}`,
      x: { name, form, low: 0 },
      y: { name: "cross-entropy, nats for each token", form: "fixed",
        low: low - (high - low) * 0.06, high: high + (high - low) * 0.03 },
      series, title: (value) => `${forms[form](value)} ${form === "short" ? name : ""}`,
    };
  });
  choice(box("loss-controls"), "Over", known.map((each) => [each, clocks[each][0]]), clock,
    (value) => { clock = value; draw(); });
}

/* Where the groups of resource lie among tasks in order; none if they are not in order. */
function bandsOf(tasks) {
  const bands = [];
  tasks.forEach((task, n) => {
    if (bands.length && bands.at(-1)[2] === task.group) bands.at(-1)[1] = n + 0.5;
    else bands.push([n - 0.5, n + 0.5, task.group]);
  });
  return bands.length <= 3 && bands.every((band) => band[2]) ? bands : [];
}

function drawQuality() {
  if (!box("quality-chart")) return;
  const has = (name) => data.quality.some((run) => run[name].some((value) => value !== null));
  let measure = has("delta") ? "delta" : "bleu", into = data.tasks.some((task) => task.into);
  const draw = chart(box("quality-chart"), () => {
    const places = data.tasks.map((_, n) => n).filter((n) => data.tasks[n].into === into);
    const tasks = places.map((n) => data.tasks[n]);
    const points = (values) => places.map((place, n) => [n, values[place]]);
    const series = [];
    for (const run of data.quality) {
      const kind = kindOf(run.run), name = data.runs[run.run];
      const smooth = points(run[`${measure}_smooth`]), few = smooth.every(([, b]) => b === null);
      series.push({ kind, name: few ? name : undefined, faint: !few, only: true, dots: few ? 4 : 0,
        says: name, points: points(run[measure]) });
      if (!few) series.push({ kind, name, says: `${name}, smoothed`, points: smooth });
    }
    if (measure === "bleu") {
      const from = (name) => data.quality.find((run) => run[name].some((value) => value !== null));
      const copy = from("copy"), base = from("baseline");
      const line = (run, name) => {
        const smooth = points(run[`${name}_smooth`]);
        return smooth.every(([, b]) => b === null) ? [points(run[name]), ""] : [smooth, ", smoothed"];
      };
      for (const [run, kind, field, name] of [[base, "s6", "baseline", "baselines"],
        [copy, "none", "copy", "copy of source"]]) {
        if (!run) continue;
        const [shown, how] = line(run, field);
        series.push({ kind, dashed: true, name, says: `${name}${how}`, points: shown });
      }
    }
    const name = measure === "delta" ? "ΔBLEU over the bilingual baselines" : "BLEU";
    return {
      label: `${name} of ${tasks.length} languages, those with most training text first`,
      x: { name: "languages, most training pairs first", low: -0.5, high: tasks.length - 0.5,
        form: "whole", labels: tasks.map((task) => task.language) },
      y: { name, form: measure === "delta" ? "signed" : "one", zero: true,
        mark: measure === "delta" ? "bilingual baselines" : "" },
      bands: bandsOf(tasks), series,
      title: (n) => `${taskName(tasks[n])}, ${forms.whole(tasks[n].pairs || 0)} pairs`,
    };
  });
  const controls = box("quality-controls");
  if (has("delta")) choice(controls, "Show", [["delta", "ΔBLEU"], ["bleu", "BLEU"]], measure,
    (value) => { measure = value; draw(); });
  if (bothWays) choice(controls, "Direction", directions, into,
    (value) => { into = value; draw(); });
}

function drawHealth() {
  for (const each of data.health) {
    const place = box(`health-${each.name}`);
    if (place) chart(place, () => ({
      small: true, height: 150, label: `${each.title} over steps: ${each.meaning}`,
      x: { form: "short", low: 0 },
      y: { form: each.form, log: each.name === "grad_norm", zero: each.name !== "grad_norm" },
      series: each.series.map((run) => ({ kind: kindOf(run.run), name: data.runs[run.run],
        points: run.points })),
      title: (step) => `step ${forms.whole(step)}`,
    }));
  }
}

/* Every sortable table: click a head to sort by it, again to turn the order round. */
function sortTables() {
  for (const span of document.querySelectorAll("[data-language]")) {
    const code = span.dataset.language, name = languageName(code);
    span.textContent = name;
    if (!span.nextElementSibling && name !== code) span.after(" ", element("small", {}, code));
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
  const search = box("language-search");
  if (!search) return;
  const panels = [...document.querySelectorAll(".panel")];
  const options = panels.map((panel) => [panel.id, panel.dataset.title]);
  const choose = (id) => { for (const panel of panels) panel.hidden = panel.id !== id; };
  choose(panels[0].id);
  choice(box("language-controls"), "Show", options, panels[0].id, choose);
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    let found = 0;
    panels.forEach((panel, n) => {
      for (const row of panel.querySelectorAll("tbody tr")) {
        row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
        if (!n && !row.hidden) found++;
      }
    });
    box("language-found").textContent = wanted ? `${found} found` : "";
  });
}

function showExamples() {
  const place = box("example-list");
  if (!place) return;
  const tasks = new Map(data.tasks.map((task) => [task.task, task]));
  const nameOf = (task) => (tasks.has(task) ? taskName(tasks.get(task)) : task);
  const known = [...new Set(data.examples.list.map((example) => example.task))];
  const select = box("example-task"), search = box("example-search"), more = box("example-more");
  for (const task of known.sort((a, b) => nameOf(a).localeCompare(nameOf(b), "en")))
    select.append(element("option", { value: task }, nameOf(task)));
  let shown = 10;
  const one = (example) => {
    const [source, target] = example.task.split("-");
    const text = (kind, language, words) => element("dd", { class: kind, lang: language,
      dir: "auto" }, words);
    const item = element("dl", { class: "example", "data-task": example.task },
      element("dt", { class: "from" }, nameOf(example.task)),
      text("source", source, example.source),
      element("dt", {}, "reference"), text("reference", target || "en", example.reference));
    for (const [run, words, score, chrf] of example.translations) {
      const name = element("dt", {}, element("i", { class: `key ${kindOf(run)}` }), data.runs[run]);
      if (score !== null) name.title = `score ${score}`;
      const said = words.trim() ? text("translated", target || "en", words)
        : element("dd", { class: "none" }, "(nothing)");
      if (chrf !== null) said.append(element("small", { dir: "ltr" }, `chrF++ ${chrf.toFixed(0)}`));
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
    box("example-found").textContent = `${found.length} of ${data.examples.list.length}`;
  };
  select.addEventListener("change", () => { shown = 10; draw(); });
  search.addEventListener("input", () => { shown = 10; draw(); });
  more.addEventListener("click", () => { shown += 20; draw(); });
  draw();
}

sortTables();
searchTables();
drawCorpora();
drawLoss();
drawQuality();
drawHeat();
drawHealth();
showExamples();
