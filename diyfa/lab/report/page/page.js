"use strict";
const report = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement, $ = id => document.getElementById(id);
const state = { device: null, pass: null, group: null, table: null, shown: new Set(report.default), print: false };
const LIGHT = { diyfa: "#0b7a75", cuDNN: "#d98200", FA3: "#2468b4", FA4: "#b8438f", FA2: "#7a5230", npu_fusion_attention: "#c0392b" };
const DARK = { diyfa: "#35c2b8", cuDNN: "#f5b041", FA3: "#6cb0f5", FA4: "#e48ac3", FA2: "#c9a27e", npu_fusion_attention: "#f1766a" };
const OTHERS = ["#6b7683", "#8e9a2f", "#5b5bb5", "#a05a5a", "#3f8f5f", "#9a6fb0"];
const SYMBOLS = { diyfa: "circle", cuDNN: "rect", FA3: "triangle", FA4: "diamond", FA2: "emptyRect" };
const HATCH = { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [3, 4], rotation: Math.PI / 4, color: "rgba(255,255,255,.75)" };
const charts = new Map();
let table = null;

const language = () => root.lang === "zh" ? 1 : 0;
const dark = () => root.dataset.theme === "dark" && !state.print;
const words = (key, places = {}) => (report.words[key] || [key, key])[language()].replace(/\{(\w+)\}/g, (all, name) => places[name] ?? all);
const word = key => Object.hasOwn(report.words, key) ? words(key) : key;
const column = name => report.words["c." + name] ? words("c." + name) : word(name);
const colour = name => (dark() ? DARK : LIGHT)[name] || OTHERS[Math.max(0, report.implementations.indexOf(name)) % OTHERS.length];
const tokens = s => s >= 1024 && s % 1024 === 0 ? s / 1024 + "k" : String(s);
const percent = (x, digits = 0) => (100 * x).toFixed(digits) + " %";
const escaped = x => String(x).replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const dtypes = [...new Set(report.heat.map(c => c.dtype))];
const masked = p => `D = ${p.D === p.Dv ? p.D : p.D + "/" + p.Dv}, ${word(p.causal ? "causal" : "full")}${dtypes.length > 1 && p.dtype ? ", " + p.dtype : ""}`;
const unique = list => [...new Set(list)];
const ink = () => getComputedStyle(root).getPropertyValue("--front").trim();
const faint = () => getComputedStyle(root).getPropertyValue("--line").trim();
const unsteady = mark => mark.spread > report.limit ? "~" : "";

/** What a tooltip says of a figure beside its value. */
function marks(mark) {
  const parts = [mark.date, mark.ms && mark.ms.toPrecision(3) + " ms", mark.spread != null && `${word("spread")} ${percent(mark.spread, 1)}`,
    mark.commit, mark.clock_mhz && mark.clock_mhz + " MHz"];
  return parts.filter(Boolean).join(", ");
}

/** Draw a plot in an element, with what all plots share. */
function draw(element, option) {
  let chart = charts.get(element);
  if (!chart) charts.set(element, chart = echarts.init(element, null, { renderer: "svg" }));
  else chart.resize();
  const axis = a => ({ axisLine: { lineStyle: { color: faint() } }, splitLine: { lineStyle: { color: faint(), opacity: .6 } }, nameTextStyle: { color: ink() }, ...a, axisLabel: { color: ink(), ...a.axisLabel } });
  chart.setOption({
    animation: false, backgroundColor: "transparent", textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: ink() },
    aria: { enabled: true, decal: { show: Boolean(option.hatched) } },
    ...option, hatched: undefined,
    title: option.title && { textStyle: { color: ink(), fontSize: 13, fontWeight: 600 }, subtextStyle: { color: ink(), fontSize: 11 }, left: 0, top: 0, itemGap: 2, ...option.title },
    legend: option.legend && { textStyle: { color: ink() }, inactiveColor: getComputedStyle(root).getPropertyValue("--quiet").trim(), ...option.legend },
    xAxis: axis(option.xAxis), yAxis: axis(option.yAxis),
    tooltip: { confine: true, backgroundColor: getComputedStyle(root).getPropertyValue("--card").trim(), borderColor: faint(), textStyle: { color: ink(), fontSize: 12 }, ...option.tooltip },
  }, true);
  chart.getZr().flush();  // a printer does not wait for the next frame
}

/** The room that a legend needs above a plot: of a wide one, of a page's width, of a telephone's. */
const headroom = (element, ...tops) => tops[element.clientWidth > 1000 ? 0 : element.clientWidth > 500 ? 1 : 2];

/** Remove the plots of a container and make `count` new places in it. */
function places(container, count) {
  for (const old of container.children) { charts.get(old)?.dispose(); charts.delete(old); }
  container.replaceChildren(...Array.from({ length: count }, () => document.createElement("div")));
  return container.children;
}

function nothing(container) {
  places(container, 0);
  const note = document.createElement("p");
  note.className = "nothing";
  note.textContent = words("nothing", { device: state.device });
  container.append(note);
}

/** Curves by sequence length: one line for each implementation. */
function curves(element, title, subtext, series, unit, logarithmic = false) {
  const lengths = unique(Object.values(series).flat().map(x => x[0])).sort((a, b) => a - b);
  const narrow = element.clientWidth < 260;
  draw(element, {
    title: { text: title, subtext }, legend: logarithmic ? { bottom: 0, type: state.print ? "plain" : "scroll" } : undefined,
    grid: { left: 46, right: 14, top: 62, bottom: logarithmic ? (state.print ? 78 : 54) : 24 },
    xAxis: { type: "category", data: lengths.map(tokens), boundaryGap: narrow ? false : true },
    yAxis: { type: logarithmic ? "log" : "value", min: logarithmic ? undefined : 0, name: unit, nameGap: 6, nameTextStyle: { align: "right", color: ink() }, axisLabel: { formatter: x => x >= 1e4 ? x / 1e3 + "k" : String(x) } },
    tooltip: { trigger: "axis", formatter: items => `<b>${escaped(items[0].name)}</b><br>` + items.sort((a, b) => b.value - a.value).map(
      i => `${i.marker}${escaped(i.seriesName)} <b>${unsteady(i.data.mark)}${i.value}</b> ${unit} <small>${escaped(marks(i.data.mark))}</small>`).join("<br>") },
    series: Object.entries(series).map(([name, entries]) => ({
      name, type: "line", symbol: SYMBOLS[name] || "emptyCircle", symbolSize: 7, color: colour(name), z: name === "diyfa" ? 5 : 2,
      lineStyle: { width: name === "diyfa" ? 3 : 2 }, connectNulls: true,
      data: lengths.map(s => { const e = entries.find(x => x[0] === s); return e ? { value: e[1], mark: e[2] } : null; }),
    })),
  });
}

const ordered = names => [...names].sort((a, b) => (report.order.indexOf(a) + 99) % 99 - (report.order.indexOf(b) + 99) % 99);
const chosen = series => Object.fromEntries(Object.entries(series).filter(([name]) => state.shown.has(name)));

function drawThroughput() {
  const panels = report.panels.filter(p => p.device === state.device && p.pass === state.pass);
  if (!panels.length) return nothing($("panels"));
  const cells = places($("panels"), panels.length);
  panels.forEach((p, i) => curves(cells[i], masked(p), [p.dtype, p.shape].filter(Boolean).join(", "), chosen(p.series), "TFLOP/s"));
}

const ratioText = r => r.toFixed(2);
function heatMap(element, cells, x, names, y, tooltip) {
  const columns = unique(cells.map(x)), rows = [...names].reverse(), narrow = root.clientWidth < 600;
  const left = Math.min(14 + (narrow ? 6 : 7) * Math.max(...rows.flatMap(r => r.split("\n").map(x => x.length + (x.match(/[^\x00-\xff]/g) || []).length))), 280);
  element.style.height = 90 + rows.length * (rows[0].includes("\n") ? 32 : 24) + "px";
  draw(element, {
    grid: { left, right: 10, top: 8, bottom: 70 },
    xAxis: { type: "category", data: columns, splitArea: { show: false }, axisLabel: { interval: 0, fontSize: narrow ? 10 : 12, lineHeight: 15 } },
    yAxis: { type: "category", data: rows, axisLabel: { fontSize: narrow ? 10 : 12, width: left - 8, overflow: "truncate" } },
    visualMap: { min: .8, max: 1.2, calculable: false, orient: "horizontal", left: "center", bottom: 0, itemHeight: 140, itemWidth: 12, precision: 2, text: ["1.2", "0.8"], textStyle: { color: ink() },
      inRange: { color: dark() ? ["#a8471e", "#7a4a38", "#3c444d", "#2c6a66", "#12918a"] : ["#e08a5b", "#f4d3bd", "#f4f4f1", "#bfe3df", "#4db6ac"] } },
    tooltip: { formatter: i => tooltip(i.data.cell) },
    series: [{ type: "heatmap", label: { show: true, color: ink(), fontSize: narrow ? 10 : 12, formatter: i => ratioText(i.data.cell.ratio) },
      data: cells.map(cell => ({ value: [columns.indexOf(x(cell)), rows.indexOf(y(cell)), cell.ratio], cell })),
      itemStyle: { borderColor: getComputedStyle(root).getPropertyValue("--back").trim(), borderWidth: 2 } }],
  });
}

function drawRatios() {
  if (!$("heat")) return;
  const mine = report.heat.filter(c => c.device === state.device);
  const about = c => `<b>${escaped(c.device)}</b><br>${word(c.pass)}, ${escaped(masked(c))}, S = ${c.S}${c.keys !== c.S ? " / " + c.keys : ""}, B = ${c.B}, H = ${c.H}${c.group > 1 ? ", H/Hk = " + c.group : ""}<br>`
    + Object.entries(c.ratios).map(([name, r]) => `${escaped(name)}: <b>${ratioText(r)}</b>`).join("<br>");
  const panel = mine.filter(c => c.panel), order = (a, b) => a.D - b.D || a.causal - b.causal || a.S - b.S;
  const lengths = unique(panel.map(c => c.S)).sort((a, b) => a - b);
  const short = pass => root.clientWidth < 600 ? word(pass === "forward" ? "fwd" : "bwd") : word(pass);
  const passes = ["forward", "backward"].filter(p => panel.some(c => c.pass === p));
  const wanted = passes.flatMap(p => lengths.map(s => `${short(p)}\n${tokens(s)}`));
  const at = c => wanted.indexOf(`${short(c.pass)}\n${tokens(c.S)}`), rows = unique([...panel].sort(order).map(masked));
  const cells = [...panel].sort((a, b) => at(a) - at(b) || order(a, b));
  if (panel.length) heatMap($("heat"), cells, c => wanted[at(c)], rows, masked, about);
  $("heat").hidden = !panel.length;
  const others = mine.filter(c => !c.panel).sort((a, b) => (a.pass < b.pass) - (a.pass > b.pass) || order(a, b));
  $("models").hidden = $("models-head").hidden = !others.length;
  const shape = c => `${masked(c)}${root.clientWidth < 600 ? "\n" : ": "}${c.B} × ${c.S}${c.keys !== c.S ? "/" + c.keys : ""}, H = ${c.H}${c.group > 1 ? "/" + c.H / c.group : ""}`;
  if (others.length) heatMap($("models"), others, c => word(c.pass), unique([...others].sort(order).map(shape)), shape, about);
}

function drawRoofline() {
  if (!$("roofline-plot")) return;
  const roof = report.roofline.find(r => r.device === state.device);
  $("roofline-plot").hidden = !roof;
  $("roofline-note").textContent = !roof ? words("nothing", { device: state.device }) : roof.ceilings.length ? "" : words("no_ceiling", { device: roof.device });
  if (!roof) return;
  const xs = roof.dots.map(d => d[0]), low = 10 ** Math.floor(Math.log10(Math.min(...xs))), high = 10 ** Math.ceil(Math.log10(Math.max(...xs)));
  const line = (tflops, gbs, label, type) => {
    const data = [];
    if (gbs) data.push([low, low * gbs / 1000], tflops ? [1000 * tflops / gbs, tflops] : [high, high * gbs / 1000]);
    else data.push([low, tflops]);
    if (tflops) data.push([high, tflops]);
    return { name: label, type: "line", data, symbol: "none", silent: true, lineStyle: { color: ink(), type, width: 1.5, opacity: type === "solid" ? .9 : .5 }, color: ink() };
  };
  const best = unit => roof.ceilings.find(c => c.unit === unit);
  const named = roof.ceilings.map(c => words(c.unit === "tflops" ? "product_ceiling" : "read_ceiling", { ...c, name: word(c.name) })).join(", ");
  const lines = [];
  if (roof.ceilings.length) lines.push(line(best("tflops")?.value, best("GB/s")?.value, named, "solid"));
  if (roof.peak) lines.push(line(roof.peak.tflops, roof.peak.gbs, `${word("peak")}: ${roof.peak.tflops} TFLOP/s, ${roof.peak.gbs} GB/s`, "dotted"));
  const names = ordered(unique(roof.dots.map(d => d[2]))).filter(n => state.shown.has(n));
  draw($("roofline-plot"), {
    legend: { top: 0 }, grid: { left: 52, right: 24, top: headroom($("roofline-plot"), 66, 86, 110), bottom: 44 },
    xAxis: { type: "log", name: word("intensity"), nameLocation: "middle", nameGap: 26, min: low, max: high, axisLabel: { formatter: x => x >= 1 ? String(Math.round(x)) : String(x) } },
    yAxis: { type: "log", name: "TFLOP/s", axisLabel: { formatter: String } },
    tooltip: { formatter: i => i.data.length > 2 ? `${escaped(i.seriesName)}: <b>${i.data[1]}</b> TFLOP/s<br>${escaped(i.data[3])}<br>${i.data[0]} FLOP/B, ${escaped(marks(i.data[4]))}` : "" },
    series: [...names.map(name => ({ name, type: "scatter", symbol: SYMBOLS[name] || "emptyCircle", symbolSize: 8, color: colour(name), itemStyle: { opacity: .75 }, data: roof.dots.filter(d => d[2] === name) })), ...lines],
  });
}

function drawMemory() {
  if (!$("memory-panels")) return;
  const panels = report.memory.filter(p => p.device === state.device);
  if (!panels.length) return nothing($("memory-panels"));
  const cells = places($("memory-panels"), panels.length);
  panels.forEach((p, i) => curves(cells[i], word(p.pass), "D" in p ? masked(p) : "", p.series, "MiB", true));
}

function drawDecoding() {
  const plot = $("decoding-plot");
  if (!plot) return;
  const mine = report.decoding.find(d => d.device === state.device);
  const groups = unique((mine?.bars || []).map(b => b[0]));
  if (!groups.includes(state.group)) state.group = groups[0] ?? null;
  fill("group", groups, state.group);
  $("decoding-about").textContent = mine ? mine.about[language()] : words("nothing", { device: state.device });
  plot.hidden = $("decoding-group").hidden = !mine;
  if (!mine) return;
  const bars = mine.bars.filter(b => b[0] === state.group), cases = unique(bars.map(b => b[1])), names = ordered(unique(bars.map(b => b[2])));
  const narrow = plot.clientWidth < 600;
  draw(plot, {
    legend: { top: 0 }, grid: { left: narrow ? 120 : 200, right: 46, top: 34, bottom: 40 },
    yAxis: { type: "category", data: cases, inverse: true, axisLabel: { width: narrow ? 112 : 190, overflow: "break", fontSize: narrow ? 10 : 12 } },
    xAxis: { type: "value", min: 0, max: v => Math.max(1, v.max), name: word("share_of_reads"), nameLocation: "middle", nameGap: 26, axisLabel: { formatter: x => percent(x), hideOverlap: true } },
    tooltip: { formatter: i => `${escaped(i.seriesName)}, ${escaped(i.name)}<br><b>${percent(i.value, 1)}</b>, ${i.data.gbs} GB/s<br>${escaped(marks(i.data.mark))}` },
    series: names.map(name => ({ name, type: "bar", color: colour(name), barMaxWidth: 14, label: { show: bars.length < 30 && !narrow, position: "right", color: ink(), fontSize: 10, formatter: i => unsteady(i.data.mark) + percent(i.value) },
      data: cases.map(c => { const b = bars.find(x => x[1] === c && x[2] === name); return b ? { value: b[3], gbs: b[4], mark: b[5] } : null; }) })),
  });
}

function drawBeside() {
  if (!$("beside-plot")) return;
  const keys = [], of = ([d, causal]) => `D = ${d}\n${word(causal ? "causal" : "full")}`;
  for (const chip of report.beside) for (const b of chip.bars) if (!keys.includes(of(b))) keys.push(of(b));
  const name = chip => chip.source === "predicted" ? `${chip.device} (${word("predicted")})` : chip.device;
  const shades = dark() ? ["#35c2b8", "#6cb0f5", "#f5b041", "#e48ac3"] : ["#0b7a75", "#2468b4", "#d98200", "#b8438f"];
  const soft = dark() ? ["#a8834a", "#8f6fa8", "#7a8f4f", "#a86a6a", "#5f8a9a", "#8a8a8a"] : ["#c9a469", "#b394c9", "#9fb56f", "#cc8f8f", "#84adbd", "#aaaaaa"];
  let real = 0, guess = 0;
  const seen = new Set(), off = {};
  for (const chip of report.beside) if (chip.source === "predicted") {  // equal predictions: one of them at first
    const same = JSON.stringify(chip.bars.map(b => Math.round(50 * b[2].share)));
    off[name(chip)] = !seen.has(same);
    seen.add(same);
  }
  draw($("beside-plot"), {
    hatched: true, legend: { top: 0, selected: off }, grid: { left: 52, right: 10, top: headroom($("beside-plot"), 90, 120, 205), bottom: 44 },
    xAxis: { type: "category", data: keys, axisLabel: { interval: 0, lineHeight: 15, fontSize: root.clientWidth < 700 ? 10 : 12 } },
    yAxis: { type: "value", min: 0, name: word("share_of_peak"), nameTextStyle: { align: "left", color: ink() }, axisLabel: { formatter: x => percent(x) } },
    tooltip: { formatter: i => `<b>${escaped(i.seriesName)}</b><br>${i.name.replace("\n", ", ")}, S = ${i.data.bar.S}<br>${word(i.data.source)}: <b>${percent(i.value, 1)}</b>, ${i.data.bar.tflops} TFLOP/s` },
    series: report.beside.map(chip => {
      const predicted = chip.source === "predicted", color = predicted ? soft[guess++ % soft.length] : shades[real++ % shades.length];
      return { name: name(chip), type: "bar", color, barMaxWidth: 34, itemStyle: { color, decal: predicted ? HATCH : { symbol: "none" }, borderColor: predicted ? color : undefined, borderWidth: predicted ? 1 : 0, borderType: "dashed" },
        label: { show: true, position: "top", color: ink(), fontSize: 10, formatter: i => predicted ? "P" : "" },
        data: keys.map(k => { const b = chip.bars.find(x => of(x) === k); return b ? { value: b[2].share, bar: b[2], source: chip.source } : null; }) };
    }),
  });
}

/** What a spreadsheet would take for a formula, as text. */
const plain = x => typeof x === "string" && /^[=+@-]/.test(x) ? "'" + x : x;

/** The rows of a table as objects, texts in place of their numbers. */
function expanded(t) {
  return t.rows.map(row => {
    const found = Object.fromEntries(t.columns.map((c, i) => [c.name, row[i] == null ? null : c.texts ? c.texts[row[i]] : row[i]]));
    if (found.file != null) {
      const file = report.files[found.file];
      Object.assign(found, { file: file.name, versions: file.versions, clocks: file.clocks || words("not_recorded") });
    }
    return found;
  });
}

function drawTable() {
  if (!$("table")) return;
  const t = report.tables.find(x => x.id === state.table);
  for (const b of $("tabs").children) b.setAttribute("aria-pressed", b.dataset.table === state.table);
  table?.destroy();
  const names = [...t.columns.map(c => c.name), ...(t.columns.some(c => c.name === "file") ? ["clocks", "versions"] : [])];
  const isText = name => t.columns.find(c => c.name === name)?.texts !== undefined || ["file", "clocks", "versions"].includes(name);
  const constant = new Set(t.columns.filter((c, i) => ["dtype", "keys", "commit", "clock_mhz"].includes(c.name) && unique(t.rows.map(r => r[i])).length < 2).map(c => c.name));
  const figures = ["tflops", "GB/s", "TFLOP/s", "ms", "host_us", "peak_mib", "value"];
  const show = name => cell => {
    const x = cell.getValue(), row = cell.getData();
    if (name === "source") return `<b class="badge ${x}">${word(x)}</b>`;
    if (name === "spread") return x == null ? "-" : percent(x, 1);
    if (x == null) return "";
    if (name === "share") return percent(x, 1);
    if (figures.includes(name) && row.spread > report.limit) return "~" + escaped(x);
    if (name === "predicted_tflops") return `≈ ${escaped(x)} <b class="badge predicted">P</b>`;
    return escaped(named(name, x));
  };
  const rows = expanded(t), named = (name, x) => name === "kind" ? word("t." + x) : ["source", "pass", "mask"].includes(name) ? word(x) : x;
  const choices = name => ({
    values: unique(rows.map(r => r[name])).filter(x => x != null).map(x => ({ label: named(name, x), value: x })),
    itemFormatter: escaped, clearable: true, autocomplete: false, sort: "asc",
  });
  table = new Tabulator("#table", {
    data: rows, layout: "fitDataFill", pagination: true, paginationSize: 15, paginationSizeSelector: [15, 100, true], locale: root.lang, placeholder: "–",
    langs: { en: {}, zh: { pagination: { page_size: "每页", first: "首页", last: "末页", prev: "上一页", next: "下一页", all: "全部", counter: {} } } },
    columns: names.map(name => ({
      title: name === "tflops" ? "TFLOP/s" : name === "predicted_tflops" ? `TFLOP/s (${word("predicted")})` : name === "host_us" ? "µs" : name === "peak_mib" ? "MiB" : column(name),
      field: name, formatter: show(name), headerFilter: isText(name) ? "list" : "number", headerFilterPlaceholder: isText(name) ? "" : "≥",
      headerFilterParams: isText(name) ? choices(name) : {}, headerFilterFunc: isText(name) ? "=" : ">=",
      hozAlign: isText(name) ? "left" : "right", sorter: isText(name) ? "string" : "number", headerSortStartingDir: isText(name) ? "asc" : "desc",
      visible: !["clocks", "versions"].includes(name) && !constant.has(name), download: true, accessorDownload: plain, minWidth: 60, maxInitialWidth: 320,
    })),
  });
}

function fill(name, values, current) {
  for (const select of document.querySelectorAll(`[data-control=${name}]`))
    select.replaceChildren(...values.map(v => { const o = new Option(word(v), v); o.selected = v === current; return o; }));
}

function drawControls() {
  const devices = unique(report.panels.map(p => p.device));
  const measured = unique([...devices, ...report.memory.map(p => p.device), ...report.decoding.map(d => d.device)]);
  state.device ??= measured[0] ?? null;
  state.pass ??= report.panels.some(p => p.pass === "forward") ? "forward" : report.panels[0]?.pass;
  fill("device", measured, state.device);
  fill("pass", unique(report.panels.map(p => p.pass)).sort().reverse(), state.pass);
  const here = report.implementations.filter(n => report.panels.some(p => p.device === state.device && p.pass === state.pass && n in p.series));
  $("implementations")?.replaceChildren(...here.map(name => {
    const chip = document.createElement("button"), dot = document.createElement("i");
    dot.style.background = colour(name);
    chip.type = "button"; chip.dataset.name = name; chip.append(dot, name); chip.setAttribute("aria-pressed", state.shown.has(name));
    chip.onclick = () => { state.shown.has(name) ? state.shown.delete(name) : state.shown.add(name); drawPlots(); };
    return chip;
  }));
}

function drawPlots() {
  drawControls();
  if ($("panels")) drawThroughput();
  drawRatios(); drawRoofline(); drawMemory(); drawDecoding(); drawBeside();
}

function drawAll() { drawPlots(); drawTable(); document.title = "diyfa: " + unique(report.standing.flatMap(g => g.devices)).join(", "); }

document.addEventListener("change", event => {
  const name = event.target.dataset?.control;
  if (name) { state[name] = event.target.value; drawPlots(); }
});
$("language").onclick = () => { root.lang = root.lang === "zh" ? "en" : "zh"; drawAll(); };
$("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; drawPlots(); };
$("tabs")?.addEventListener("click", event => {
  const tab = event.target.closest("[data-table]");
  if (tab) { state.table = tab.dataset.table; drawTable(); }
});
if ($("download")) $("download").onclick = () => table.download("csv", `diyfa-${state.table}.csv`, { bom: true });
let timer = 0, width = innerWidth;
addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(() => { if (innerWidth !== width && !state.print) { width = innerWidth; drawPlots(); } }, 150); });
addEventListener("beforeprint", () => {  // on paper: light, and as wide as A4
  state.print = true; state.theme = root.dataset.theme; root.dataset.theme = "light"; document.body.style.width = "186mm"; drawPlots();
});
addEventListener("afterprint", () => { state.print = false; root.dataset.theme = state.theme; document.body.style.width = ""; drawPlots(); });

if (matchMedia("(prefers-color-scheme: dark)").matches) root.dataset.theme = "dark";
if ((navigator.language || "").startsWith("zh")) root.lang = "zh";
state.table = report.tables[0]?.id;
drawAll();
