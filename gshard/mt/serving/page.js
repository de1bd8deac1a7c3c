"use strict";
const $ = (id) => document.getElementById(id);

// Everything that is shown goes through here: text is only ever set as text.
function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

let about = null;
const names = new Intl.DisplayNames(["en"], {type: "language", fallback: "code"});
function languageName(code) {
  try { return names.of(code.replace(/_/g, "-").replace(/@.*/, "")); } catch { return code; }
}

function hue(expert) {  // evenly round the circle, neighbours in number far apart
  const count = about.experts, step = count % 3 ? 3 : count % 5 ? 5 : 7;
  return count <= 24 ? 20 + 360 * ((expert * step) % count) / count : (20 + expert * 137.508) % 360;
}

const EXAMPLES = {
  es: "El archivo no existe.", fr: "Le nom de la personne", de: "Das Bild wurde geöffnet.",
  it: "Seleziona una immagine.", pt: "A data do evento", ca: "Voleu esborrar aquesta pàgina?",
  ru: "Файл не найден.", nl: "Het bestand bestaat niet.", pl: "Plik nie istnieje.",
  sv: "Filen finns inte.", tr: "Dosya bulunamadı.", en: "The file does not exist.",
};

// What can be asked for: sentences to click, languages by name, and the request itself.
function offer() {
  const known = about.sources.filter((code) => EXAMPLES[code]).slice(0, 5);
  for (const code of known) {
    const button = make("button", EXAMPLES[code]);
    button.type = "button";
    button.lang = code;
    button.title = languageName(code);
    button.addEventListener("click", () => {
      $("text").value = EXAMPLES[code];
      $("source").value = code;
      translate();
    });
    $("examples").append(button);
  }
  $("examples").hidden = !known.length;
  const from = about.sources.map(languageName).sort(), into = about.targets.map(languageName).sort();
  $("known").textContent = `${from.length} language${from.length === 1 ? "" : "s"} to translate from`;
  $("languages").textContent = `From ${from.join(", ")}; into ${into.join(", ")}.`;
  const body = JSON.stringify({text: EXAMPLES[known[0]] || "…", ...languages()});
  const address = location.origin + location.pathname + "translate";
  $("api").textContent = `curl ${address} -H "Content-Type: application/json" -d '${body}'`;
}

// Until the first programs are compiled, the page says that the first answer will wait.
async function watchWarmUp() {
  for (;;) {
    const health = await (await fetch("/health")).json();
    document.body.dataset.health = health.status;
    const warming = health.status !== "ready";
    if (!$("go").disabled && (warming || /warming/.test($("status").textContent)))
      $("status").textContent = warming ? "warming up: the first answer waits for its program" : "ready";
    if (!warming) return;
    await new Promise((done) => setTimeout(done, 1000));
  }
}

async function start() {
  about = await (await fetch("model")).json();
  const sizes = [];
  if (about.experts) sizes.push(`${about.experts} experts in every other layer`);
  sizes.push(`${about.encoder_layers} + ${about.decoder_layers} layers`);
  sizes.push(`${new Intl.NumberFormat("en", {notation: "compact"}).format(about.weights)} weights`);
  sizes.push(`step ${about.step.toLocaleString("en")}`);
  $("name").textContent = about.name;
  document.title = about.name + " – gshard";
  $("model").textContent = sizes.join(" · ");
  for (const [id, codes] of [["source", about.sources], ["target", about.targets]]) {
    for (const code of codes) {
      const option = make("option", languageName(code));
      option.value = code;
      $(id).append(option);
    }
  }
  $("target").value = about.target;
  $("target").hidden = about.targets.length < 2;
  $("source").hidden = !about.needs_source;
  const asked = new URLSearchParams(location.search);
  if (about.sources.includes(asked.get("from"))) $("source").value = asked.get("from");
  if (about.targets.includes(asked.get("to"))) $("target").value = asked.get("to");
  showTarget();
  offer();
  watchWarmUp().catch(() => {});
  if (asked.get("q")) {
    $("text").value = asked.get("q");
    await translate();
  }
}

function showTarget() {
  $("into").textContent = languageName($("target").value || about.target);
}

function languages() {
  const target = $("target").value || about.target;
  return about.needs_source ? {source: $("source").value, target} : {target};
}

let latest = 0;
async function translate() {
  const mine = ++latest, text = $("text").value;
  $("error").hidden = true;
  if (!text.trim()) { show({translation: "", alternatives: [], parts: []}); $("status").textContent = ""; return; }
  $("go").disabled = true;
  $("translation").classList.add("waiting");
  const began = performance.now();
  const clock = setInterval(() => {
    const seconds = Math.round((performance.now() - began) / 1000);
    $("status").textContent = seconds < 2 ? "translating …" :
      `translating … ${seconds} s (the first sentence of a length waits for its program)`;
  }, 250);
  try {
    const reply = await fetch("translate", {
      method: "POST",
      headers: {"Content-Type": "application/json"},
      body: JSON.stringify({text, ...languages()}),
    });
    const answer = await reply.json();
    if (!reply.ok) throw new Error(answer.error);
    if (mine === latest) {
      show(answer);
      $("status").textContent = `${answer.seconds.toFixed(2)} s`;
    }
  } catch (error) {
    $("status").textContent = "";
    $("error").textContent = error instanceof TypeError
      ? "The server does not answer; is `gshard serve` still running?" : error.message;
    $("error").hidden = false;
  } finally {
    clearInterval(clock);
    $("go").disabled = false;
    $("translation").classList.remove("waiting");
    document.body.dataset.done = mine;
  }
}

function show(answer) {
  $("translation").textContent = answer.translation;
  $("copy").hidden = !answer.translation;
  showAlternatives(answer.alternatives);
  showExperts(answer.parts);
}

function showAlternatives(found) {
  const best = found.length ? found[0].score : 0;
  $("others").hidden = found.length < 2;
  $("alternatives").replaceChildren(...found.map((each) => {
    const item = make("li"), score = make("span", undefined, "score"), track = make("i"), fill = make("b");
    const text = make("span", each.text, "text");
    text.dir = "auto";
    fill.style.setProperty("--share", `${100 * Math.exp(each.score - best)}%`);
    track.append(fill);
    score.append(track, make("span", each.score.toFixed(3).replace("-", "−")));
    score.title = "its length-normalised probability, beside that of the best";
    item.append(text, score);
    return item;
  }));
}

const SYMBOLS = {"</s>": "end", "<s>": "start", "<unk>": "unknown"};
function spelled(piece) {
  if (SYMBOLS[piece]) return [SYMBOLS[piece], "symbol end"];
  const tag = piece.match(/^<2(.+)>$/), byte = piece.match(/^<0x(..)>$/);
  if (tag) return [`into ${tag[1]}`, "symbol"];
  if (byte) return [byte[1], "symbol"];
  return piece.startsWith("▁") ? [piece.slice(1) || "␣", "word"] : [piece, ""];
}

function layerNumber(index) { return 2 * index + 2; }

function token(route, side) {
  const [text, kind] = spelled(route.piece);
  const element = make("div", undefined, `token ${kind}`);
  element.append(make("span", text));
  const used = new Set();
  for (const choices of route.layers) {
    const strip = make("div", undefined, "strip");
    for (const [expert, weight] of choices) {
      const part = make("b", weight >= 0.3 ? String(expert) : "");
      part.style.setProperty("--weight", Math.max(weight, 0.001));
      part.style.setProperty("--hue", hue(expert));
      strip.append(part);
      if (weight > 0) used.add(expert);
    }
    element.append(strip);
  }
  element.dataset.uses = [...used].join(" ");
  element.tabIndex = 0;
  element.setAttribute("aria-label", `${text}: ` + route.layers.map((choices, i) =>
    `layer ${layerNumber(i)} ` + choices.map(([e, w]) => `expert ${e} ${percent(w)}`).join(", ")).join("; "));
  const tell = () => showTip(element, text, route.layers, side);
  element.addEventListener("pointerenter", tell);
  element.addEventListener("focus", tell);
  element.addEventListener("pointerleave", hideTip);
  element.addEventListener("blur", hideTip);
  return element;
}

function percent(weight) { return `${Math.round(100 * weight)} %`; }

function showTip(element, text, layers, side) {
  const table = make("table");
  layers.forEach((choices, i) => {
    const row = make("tr");
    row.append(make("td", `${side} layer ${layerNumber(i)}`));
    for (const [expert, weight] of choices) row.append(make("td", `expert ${expert}  ${percent(weight)}`));
    table.append(row);
  });
  $("tip").replaceChildren(make("strong", text), table);
  $("tip").hidden = false;
  const box = element.getBoundingClientRect(), own = $("tip").getBoundingClientRect();
  const above = box.top - own.height - 8;
  $("tip").style.top = `${above > 8 ? above : box.bottom + 8}px`;
  $("tip").style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
}
function hideTip() { $("tip").hidden = true; }

function showExperts(parts) {
  const layers = (side) => parts.length && parts[0][side].length ? parts[0][side][0].layers.length : 0;
  const [encoder, decoder] = [layers("source"), layers("output")];
  $("experts").hidden = !(encoder || decoder);
  if ($("experts").hidden) return;
  const rows = (count) => count === 1 ? "one layer" : `${count} layers, from top to bottom`;
  $("explained").textContent =
    `Below each token stands a strip for every layer that has experts (in the encoder ` +
    `${rows(encoder)}; in the decoder ${rows(decoder)}), shared out among the token’s experts by ` +
    `their weights. Point at an expert to see its tokens, or at a token for the numbers.`;
  const total = new Array(about.experts).fill(0);
  for (const part of parts) for (const side of ["source", "output"]) for (const route of part[side])
    for (const choices of route.layers) for (const [expert, weight] of choices) total[expert] += weight > 0;
  $("legend").replaceChildren(...total.flatMap((count, expert) => {
    if (!count) return [];
    const swatch = make("li", String(expert), "swatch");
    swatch.style.setProperty("--hue", hue(expert));
    swatch.tabIndex = 0;
    swatch.setAttribute("aria-label", `expert ${expert}, used ${count} times`);
    swatch.title = `expert ${expert}, used ${count} times`;
    for (const event of ["pointerenter", "focus"]) swatch.addEventListener(event, () => choose(expert));
    for (const event of ["pointerleave", "blur"]) swatch.addEventListener(event, () => choose(null));
    return [swatch];
  }));
  $("parts").replaceChildren(...parts.map((part) => {
    const card = make("div", undefined, "card");
    for (const [side, title, stack] of [["source", "Text, in the encoder", "encoder"],
                                        ["output", "Translation, in the decoder", "decoder"]]) {
      const block = make("div", undefined, "side"), flow = make("div", undefined, "tokens");
      flow.dir = "auto";
      const tokens = part[side].map((route) => token(route, stack));
      tokens.forEach((each, i) => each.classList.toggle("last",  // of a word
        i + 1 < tokens.length && /word|end/.test(tokens[i + 1].className)));
      flow.append(...tokens);
      block.append(make("span", title, "label"), flow);
      card.append(block);
    }
    return card;
  }));
}

function choose(expert) {
  $("parts").classList.toggle("chosen", expert !== null);
  for (const element of $("parts").querySelectorAll(".token"))
    element.classList.toggle("uses", element.dataset.uses.split(" ").includes(String(expert)));
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); translate(); });
for (const id of ["source", "target"])
  $(id).addEventListener("change", () => { showTarget(); if ($("text").value.trim()) translate(); });
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); translate(); }
});
$("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText($("translation").textContent);
  $("copy").textContent = "Copied";
  setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
});
addEventListener("scroll", hideTip, {passive: true});
start().catch(() => {
  $("error").textContent = "The server does not answer; is `gshard serve` still running?";
  $("error").hidden = false;
});
