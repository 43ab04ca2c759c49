// The script of plan pages, and of the sections of plans in a lab: enhance() adds controls to the HTML of the report.

const SVG = document.createRange().createContextualFragment("<svg></svg>").firstChild.namespaceURI;

/** An element. Attributes that are functions are listeners; children are elements or texts; null and false are left out. */
function make(tag, attributes = {}, ...children) {
  const out = /^(svg|svg:a|rect|path|text|circle|g|line|title|tspan)$/.test(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") out.addEventListener(name, value);
    else if (value === true) out.setAttribute(name, "");
    else if (value !== false && value != null) out.setAttribute(name, value);
  }
  out.append(...children.filter((child) => child != null && child !== false));
  return out;
}

/** The page of a plan: its controls, downloads, and links to closed groups. */
function startPage(root) {
  enhance(root);
  const data = root.querySelector("script#plan");
  if (data) root.querySelector("nav").append(make("span", { class: "downloads" }, ...downloads(data.textContent)));
  const follow = () => openTarget(root, location.hash);
  addEventListener("hashchange", follow);
  follow();
}

/** Add the controls of all sections in `root`; `kept`: the state of the controls, for a root that is drawn again. */
function enhance(root, kept = {}) {
  root.querySelectorAll("table.sort").forEach(sortable);
  root.querySelectorAll(".by-rule").forEach((groups) => filterable(groups, kept));
  root.querySelectorAll(".picture").forEach((place) => drawn(place, kept));
  root.querySelectorAll(".tensors").forEach((section) => choosable(section, kept));
  root.querySelectorAll(".drawing[data-cut]").forEach((place) => drawShards(place, { path: place.dataset.path }, JSON.parse(place.dataset.cut)));
  highlightRules(root);
}

/** The headings of a table sort its rows. */
function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    heads.forEach((h) => h.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const of = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
    const number = head.classList.contains("n");
    const rows = [...table.tBodies[0].rows].sort((a, b) => number ? of(a) - of(b) : of(b).localeCompare(of(a)));
    table.tBodies[0].append(...(down ? rows.reverse() : rows));
  }));
}

/** A link to a closed group opens it. */
function openTarget(root, hash) {
  const target = hash.length > 1 && root.querySelector(`#${CSS.escape(hash.slice(1))}`);
  if (!target) return;
  if (target.tagName === "DETAILS") target.open = true;
  target.scrollIntoView();
}

/** A text field that shows only the collectives with its words. */
function filterable(groups, kept) {
  const all = [...groups.querySelectorAll("details.of-rule")];
  const count = make("span", { class: "dim", role: "status" });
  const input = make("input", { type: "search", class: "mono", placeholder: "all-gather embed", "aria-label": "filter collectives", size: 24, input: () => filter() });
  let before = null; // which groups were open without a filter
  function filter() {
    const words = kept.filter = input.value.toLowerCase();
    const parts = words.split(/\s+/).filter(Boolean);
    before ??= all.map((group) => group.open);
    let shown = 0, rows = 0;
    all.forEach((group, k) => {
      const name = group.querySelector("summary").textContent;
      let here = 0;
      for (const row of group.querySelectorAll("tbody tr")) {
        const text = `${name} ${row.textContent}`.toLowerCase();
        row.hidden = !parts.every((part) => text.includes(part));
        here += !row.hidden;
        rows += 1;
      }
      shown += here;
      group.hidden = here === 0;
      group.open = parts.length ? here > 0 : before[k];
    });
    if (!parts.length) before = null;
    count.textContent = parts.length ? `${shown} of ${rows} rows` : "";
  }
  groups.prepend(make("p", { class: "filter" }, make("label", {}, "filter ", input), " ", count));
  for (const group of all) {
    group.open ||= kept.open?.has(group.id);
    group.addEventListener("toggle", () => {
      kept.open ??= new Set();
      kept.open[group.open ? "add" : "delete"](group.id);
    });
  }
  if (kept.filter) { input.value = kept.filter; filter(); }
}

/** Pointing at a rule, or focusing it, highlights the arguments that it shards and the collectives that it causes. */
function highlightRules(root) {
  for (const rule of root.querySelectorAll("tr[data-rule]")) {
    const k = rule.dataset.rule;
    const light = (on) => document.querySelectorAll(`.mp tr[data-rules~="${k}"], .mp details[data-rule="${k}"], .mp tr[data-rule="${k}"]`)
      .forEach((row) => row.classList.toggle("lit", on));
    const sent = [...rule.cells].find((cell) => cell.querySelector(".bar"));
    if (sent.textContent !== "–") sent.firstChild.replaceWith(make("a", { href: `#sent-${k}`, title: "its collectives" }, sent.firstChild.textContent));
    rule.tabIndex = 0;
    rule.addEventListener("pointerenter", () => light(true));
    rule.addEventListener("pointerleave", () => light(false));
    rule.addEventListener("focusin", () => light(true));
    rule.addEventListener("focusout", () => light(false));
  }
}

/** The paths of arguments become buttons; the chosen argument is drawn. */
function choosable(section, kept) {
  const place = section.querySelector(".drawing");
  const rows = [...section.querySelectorAll("tr[data-cut]")];
  const choose = (row) => {
    for (const other of rows) other.querySelector("button.path").setAttribute("aria-pressed", `${other === row}`);
    kept.path = row.querySelector("button.path").textContent;
    drawShards(place, kept, JSON.parse(row.dataset.cut));
  };
  for (const row of rows) {
    const path = row.querySelector("code.path");
    path.replaceWith(make("button", { type: "button", class: "path mono", "aria-pressed": "false", click: () => choose(row) }, path.textContent));
  }
  const first = rows.find((row) => row.querySelector("button.path").textContent === kept.path) ?? rows.find((row) => row.dataset.rules) ?? rows[0];
  if (first) choose(first);
}

/** Draw how an array is sharded: its shards, the devices of the mesh, and the slice that the chosen device stores.
 *  @param dims [name, size, axes] of each dim */
function drawShards(place, kept, dims) {
  const mesh = JSON.parse(place.dataset.mesh);
  const size = Object.fromEntries(mesh), colour = Object.fromEntries(mesh.map(([axis, , c]) => [axis, `var(--${c.replace("c", "a")})`]));
  const device = kept.device = Object.fromEntries(mesh.map(([axis, n]) => [axis, Math.min(kept.device?.[axis] ?? 0, n - 1)]));
  const picture = make("div", {});
  const count = (axes) => axes.reduce((n, axis) => n * size[axis], 1);
  const index = (axes, at) => axes.reduce((k, axis) => k * size[axis] + at[axis], 0);
  const axesOf = dims.flatMap(([, , axes]) => axes);
  const fill = colour[axesOf.find((axis) => size[axis] > 1)] ?? "var(--none)";
  const sliders = mesh.filter(([, n]) => n > 1).map(([axis, n, c]) => {
    const output = make("output", {}, `${device[axis]}`);
    const input = make("input", {
      type: "range", min: 0, max: n - 1, value: device[axis], class: c, "aria-label": `index along ${axis}`,
      input: () => { device[axis] = Number(input.value); output.textContent = input.value; draw(); },
    });
    return make("label", {}, make("span", { class: `chip on ${c}` }, axis), input, output);
  });
  const move = (at) => {
    Object.assign(device, at);
    place.querySelectorAll("input").forEach((input, k) => {
      input.value = device[mesh.filter(([, n]) => n > 1)[k][0]];
      input.nextSibling.textContent = input.value;
    });
    draw();
  };
  const text = (x, y, string, attributes = {}) => make("text", { x, y, "font-size": 11, fill: "var(--dim)", ...attributes }, string);
  const label = ([name, n, axes]) => `${name} ${n}${axes.length ? `: ${axes.join("+")}` : ""}`;
  const inkOf = ([, , axes]) => colour[axes.find((axis) => size[axis] > 1)] ?? "var(--dim)";

  /** The array as a rectangle: two of its dims, sharded ones first, cut into shards. */
  function arrayPicture() {
    const order = dims.map((_, k) => k).sort((a, b) => (count(dims[b][2]) > 1) - (count(dims[a][2]) > 1) || dims[b][1] - dims[a][1]);
    const [down, across] = order.slice(0, 2).sort((a, b) => a - b).map((k) => dims[k]);
    const [rowDim, columnDim] = across ? [down, across] : [["", 1, []], down ?? ["", 1, []]];
    const [rows, columns] = [count(rowDim[2]), count(columnDim[2])];
    const [x, y, w, h] = [20, 18, 240, rowDim[0] ? 120 : 30];
    const cell = { x: x + (w * index(columnDim[2], device)) / columns, y: y + (h * index(rowDim[2], device)) / rows, width: w / columns, height: h / rows };
    const lines = (n, of) => (n <= 64 ? Array.from({ length: n - 1 }, (_, k) => of((k + 1) / n)).join("") : "");
    const grid = lines(columns, (part) => `M${x + w * part} ${y}v${h}`) + lines(rows, (part) => `M${x} ${y + h * part}h${w}`);
    return make("svg", { viewBox: `0 0 264 ${y + h + 4}`, role: "img", "aria-label": `the array in ${rows * columns} shards` },
      make("rect", { x, y, width: w, height: h, fill: "var(--soft)", stroke: "var(--none)" }),
      make("rect", { ...cell, fill, class: "shard" }), make("path", { d: grid, stroke: "var(--none)", "stroke-width": 0.7 }),
      text(x, 12, columnDim[0] ? label(columnDim) : "scalar", { fill: inkOf(columnDim) }),
      rowDim[0] ? text(12, y + h / 2, label(rowDim), { fill: inkOf(rowDim), "text-anchor": "middle", transform: `rotate(-90 12 ${y + h / 2})` }) : null);
  }

  /** The devices as a grid, the first axis across and the others down; those with the chosen device's shard are filled. */
  function meshPicture() {
    const [first, ...others] = mesh.filter(([, n]) => n > 1);
    if (!first) return null;
    const lines = Math.min(count(others.map(([axis]) => axis)), 16), columns = Math.min(first[1], 32);
    const step = Math.min(14, 240 / columns), cells = [];
    for (let j = 0; j < lines; j++) for (let i = 0; i < columns; i++) {
      const at = { [first[0]]: i };
      for (let k = others.length - 1, rest = j; k >= 0; k--) { at[others[k][0]] = rest % others[k][1]; rest = Math.floor(rest / others[k][1]); }
      const all = { ...device, ...at };
      const same = axesOf.every((axis) => all[axis] === device[axis]);
      const own = mesh.every(([axis]) => all[axis] === device[axis]);
      cells.push(make("rect", {
        x: 21 + step * i, y: 19 + step * j, width: step - 2, height: step - 2, rx: 1.5, fill: same ? fill : "var(--line)", class: same ? "same" : "",
        stroke: own ? "var(--ink)" : "none", "stroke-width": 1.5, click: () => move(at),
      }, make("title", {}, Object.entries(all).map(([axis, n]) => `${axis} ${n}`).join(", "))));
    }
    const shown = columns < first[1] || lines < count(others.map(([axis]) => axis)) ? `, the first ${columns} × ${lines} drawn` : "";
    const name = others.map(([axis, n]) => `${axis} ${n}`).join(" × "), middle = 19 + (step * lines) / 2;
    const height = 24 + Math.max(step * lines, name.length * 6);
    return make("svg", { class: "devices", viewBox: `0 0 264 ${height}`, role: "img", "aria-label": `mesh of ${mesh.map(([axis, n]) => `${axis} ${n}`).join(" by ")}` },
      text(20, 12, `${first[0]} ${first[1]}${shown}`, { fill: colour[first[0]] }), ...cells,
      name ? text(12, Math.max(middle, 19 + name.length * 3), name,
        { fill: colour[others[0][0]], "text-anchor": "middle", transform: `rotate(-90 12 ${Math.max(middle, 19 + name.length * 3)})` }) : null);
  }

  function draw() {
    const slices = dims.map(([name, n, axes]) => {
      const shard = Math.ceil(n / count(axes)), from = shard * index(axes, device);
      return make("li", {}, count(axes) > 1 ? `${name} ${from}:${Math.min(from + shard, n)} of ${n}` : `${name} all ${n}`);
    });
    const devices = count(mesh.map(([axis]) => axis)), copies = devices / count([...new Set(axesOf)]);
    const about = copies === devices ? "Replicated: every device stores all of it." :
      `${devices / copies} shards; ${copies === 1 ? "each on one device." : `each on ${copies} devices.`}`;
    picture.replaceChildren(arrayPicture(), ...[meshPicture()].filter(Boolean), make("p", { class: "dim" }, about),
      make("p", {}, "This device stores"), make("ul", { class: "mono" }, ...slices));
  }
  draw();
  place.replaceChildren(make("h3", {}, make("code", {}, kept.path)), picture, make("p", { class: "dim" }, "Device:"), ...sliders);
  if (!sliders.length) place.lastChild.remove();
}

/** Buttons that save the plan as JSON, and its collectives as CSV. */
function downloads(json) {
  const save = (name, type, text) => {
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const button = (label, click) => make("button", { type: "button", click }, label);
  return [
    button("Download JSON", () => save("plan.json", "application/json", json)),
    button("Download CSV", () => save("collectives.csv", "text/csv", collectivesCsv(JSON.parse(json).collectives))),
  ];
}

/** Collectives as CSV, with the columns of `meshpar plan --csv`. */
function collectivesCsv(collectives) {
  const columns = ["op", "axes", "tensor", "dims", "dtype", "bytes", "calls", "total_bytes", "seconds", "algorithm", "cause", "source", "module", "package_line"];
  const rows = collectives.map((c) => ({ ...c, axes: c.axes.join("+"), calls: c.count, total_bytes: c.bytes * (c.count ?? 1) }));
  const quoted = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  return [columns, ...rows.map((row) => columns.map((column) => `${row[column] ?? ""}`))].map((row) => `${row.map(quoted).join(",")}\r\n`).join("");
}

// -- pictures that are drawn from the data in the page

/** The functions that draw, by the name in `data-draw`. Another picture is one more function here. */
const PICTURES = { drawTimeline, drawPipeline, drawMemory, drawRoofline, drawPairs, drawParts, drawTorus, drawLayer, drawBars, drawRuns };

/** Draw a picture from the JSON in it, and again whenever its width changes. */
function drawn(place, kept) {
  const data = JSON.parse(place.querySelector("script").textContent);
  const draw = PICTURES[place.dataset.draw](place, data, kept);
  let width = 0;
  const redraw = () => {
    if (place.clientWidth === width) return;
    width = place.clientWidth;
    draw();
  };
  redraw();
  if (!width) draw();
  new ResizeObserver(redraw).observe(place);
}

/** `1.23 s`, `45.6 ms`, `7.89 µs`, as reports have it. */
function secondsText(s) {
  for (const [unit, scale] of [["s", 1], ["ms", 1e3], ["µs", 1e6]]) {
    const n = s * scale;
    if (Math.abs(n) >= 1 || unit === "µs") return `${Math.abs(n) < 100 ? Number(n.toPrecision(3)) : n.toFixed(0)} ${unit}`;
  }
}

/** `15.75 GiB`, `4.00 MiB`, as reports have it. */
function memoryText(n) {
  for (const [unit, size, digits] of [["TiB", 2 ** 40, 2], ["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 2], ["KiB", 2 ** 10, 1]]) {
    if (n >= (unit === "GiB" ? 0.1 * size : size)) return `${(n / size).toFixed(digits)} ${unit}`;
  }
  return `${n.toFixed(0)} B`;
}

/** `1.5 MB`: bytes of traffic, as reports have it. */
function bytesText(n) {
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (n < 1000 || unit === "TB") return `${unit === "B" || n >= 100 ? n.toFixed(0) : Number(n.toPrecision(3))} ${unit}`;
    n /= 1000;
  }
}

/** The largest of 1, 2 or 5 times a power of ten that is at most `n`. */
function roundStep(n) {
  const decade = 10 ** Math.floor(Math.log10(n));
  return [5, 2, 1].map((k) => k * decade).find((step) => step <= n * (1 + 1e-9)) ?? decade;
}

/** The width of a label in pixels. */
function textWidth(text) {
  textWidth.context ??= document.createElement("canvas").getContext("2d");
  textWidth.context.font = "11px system-ui, sans-serif";
  return textWidth.context.measureText(text).width;
}

/** A tooltip in `place`: show(lines, the rectangle that it is about), hide(). */
function tooltip(place) {
  const tip = make("div", { class: "tip", hidden: true });
  place.append(tip);
  return {
    show(lines, at) {
      tip.replaceChildren(...lines.filter(Boolean).map((line) => make("div", {}, line)));
      tip.hidden = false;
      const width = document.documentElement.clientWidth;
      tip.style.left = `${Math.max(8, Math.min(at.left, width - tip.offsetWidth - 8))}px`;
      tip.style.top = at.bottom + tip.offsetHeight + 8 < innerHeight ? `${at.bottom + 4}px` : `${Math.max(4, at.top - tip.offsetHeight - 4)}px`;
    },
    hide() { tip.hidden = true; },
  };
}

const MIN_ITERATION = 44; // pixels from which on each iteration of a loop is drawn
const MIN_BOX = 1.5; // pixels; narrower boxes are drawn together

/** The timeline of a step: a lane for kernels and for each network; a loop is one box, or its iterations where they are wide enough. */
function drawTimeline(place, data, kept) {
  const stepSeconds = data.seconds;
  const view = kept.timeline?.stepSeconds === stepSeconds ? kept.timeline : (kept.timeline = { stepSeconds, from: 0, to: stepSeconds });
  const shares = new Map();
  const cssOf = (s) => (s.axes ? data.colours[s.axes[0]] : "ink");

  /** The lines of the tooltip of a span: name, seconds, dims and bytes, cause with its rule, source line. */
  function tipOf(s) {
    if (s.body) return [`${s.name}: ${secondsText(s.seconds)} = ${s.trips} × ${secondsText(s.body.seconds)}`, s.source];
    const over = s.axes ? ` over ${s.axes.join("+")}` : "";
    const wait = s.lane === "compute" ? "" : s.exposed ? `, ${secondsText(s.exposed)} exposed` : ", hidden";
    const of = { compute: "of HBM traffic", "host link": "per device" }[s.lane] ?? "sent per device";
    return [`${s.name}${over}: ${secondsText(s.seconds)}${wait}`, s.dims || "(scalar)", s.bytes && `${bytesText(s.bytes)} ${of}`, s.cause, s.source];
  }

  /** Of a run of a computation, lane → seconds: busy, exposed, by colour; and its phases. */
  function totals(run) {
    if (shares.has(run)) return shares.get(run);
    const out = { lanes: {}, phases: new Set() };
    const lane = (name) => (out.lanes[name] ??= { busy: 0, exposed: 0, css: {} });
    for (const s of run.spans) {
      if (s.body) {
        const inner = totals(s.body);
        for (const [name, of] of Object.entries(inner.lanes)) {
          const mine = lane(name);
          mine.busy += s.trips * of.busy;
          mine.exposed += s.trips * of.exposed;
          for (const [css, n] of Object.entries(of.css)) mine.css[css] = (mine.css[css] ?? 0) + s.trips * n;
        }
        inner.phases.forEach((phase) => out.phases.add(phase));
      } else {
        const mine = lane(s.lane);
        mine.busy += s.seconds;
        mine.exposed += s.exposed;
        mine.css[cssOf(s)] = (mine.css[cssOf(s)] ?? 0) + s.seconds;
        if (s.lane === "compute") out.phases.add(s.phase);
      }
    }
    shares.set(run, out);
    return out;
  }
  const all = totals(data);

  /** The boxes of each lane within the view, in order, and the phases as [start, end, name]. */
  function boxes(scale) {
    const lanes = Object.fromEntries(data.lanes.map((lane) => [lane, []])), phases = [];
    const phase = (start, end, name) => {
      const last = phases.at(-1);
      if (last?.[2] === name) last[1] = Math.max(last[1], end); else phases.push([start, end, name]);
    };
    const visit = (run, at) => {
      for (const s of run.spans) {
        const start = at + s.start, end = start + s.seconds;
        if (start > view.to || end < view.from) continue;
        if (!s.body) {
          const waitsFirst = s.exposed && !run.spans.some((k) => ["compute", "loop"].includes(k.lane) && k.start <= s.start + 1e-3 * s.seconds && k.start + k.seconds > s.start + 1e-3 * s.seconds);
          const labels = [s.dims ? `${s.name} ${s.dims}` : s.name, s.name];
          lanes[s.lane].push({ start, end, busy: s.seconds, exposed: s.exposed, css: cssOf(s), tip: tipOf(s), labels, n: 1, waitsFirst });
          if (s.lane === "compute") phase(start, end, s.phase);
        } else if (s.body.seconds * scale >= MIN_ITERATION || s.trips === 1) {
          const each = s.body.seconds;
          const last = Math.min(s.trips - 1, Math.floor((view.to - start) / each));
          for (let k = Math.max(0, Math.floor((view.from - start) / each)); k <= last; k++) visit(s.body, start + k * each);
        } else {
          const inner = totals(s.body);
          for (const [lane, of] of Object.entries(inner.lanes)) {
            const css = Object.entries(of.css).sort((a, b) => b[1] - a[1])[0][0];
            const busy = s.trips * of.busy, exposed = s.trips * of.exposed;
            const share = `${lane}: busy ${secondsText(busy)} (${(100 * busy / s.seconds).toFixed(0)} %)${exposed ? `, exposed ${secondsText(exposed)}` : ""}`;
            const labels = lane === "compute" ? [`${s.name} × ${s.trips}, ${secondsText(s.body.seconds)} each`, `${s.name} × ${s.trips}`, `× ${s.trips}`]
              : [`${secondsText(busy)}${exposed ? `, ${secondsText(exposed)} exposed` : ""}`, secondsText(busy)];
            lanes[lane].push({ start, end, busy, exposed, css, tip: [...tipOf(s), share], labels, n: 1, loop: true });
          }
          phase(start, end, [...inner.phases].join(" and "));
        }
      }
    };
    visit(data, 0);
    for (const [lane, of] of Object.entries(lanes)) lanes[lane] = together(of.sort((a, b) => a.start - b.start), scale, lane);
    return { lanes, phases: phases.sort((a, b) => a[0] - b[0]) };
  }

  /** Boxes of a lane, with neighbours that are too narrow as one box. */
  function together(all, scale, lane) {
    const out = [];
    for (const box of all) {
      const last = out.at(-1);
      const small = (box.end - box.start) * scale < MIN_BOX;
      if (small && last?.small && (box.start - last.end) * scale < MIN_BOX) {
        last.end = Math.max(last.end, box.end);
        last.busy += box.busy;
        last.exposed += box.exposed;
        last.n += box.n;
        last.labels = [];
        last.tip = [`${last.n} ${lane === "compute" ? "kernels" : "collectives or copies"}: ${secondsText(last.busy)}${last.exposed ? `, ${secondsText(last.exposed)} exposed` : ""}`, "zoom in to see each"];
      } else {
        out.push({ ...box, small });
      }
    }
    return out;
  }

  /** A row for each box of a lane such that the boxes of a row do not overlap; returns the number of rows. */
  function stacked(boxes) {
    const ends = [];
    for (const box of boxes) {
      const free = ends.findIndex((end) => end <= box.start + 1e-9 * stepSeconds);
      box.row = free < 0 ? ends.length : free;
      ends[box.row] = box.end;
    }
    return Math.max(1, ends.length);
  }

  const rows = make("div", { class: "time" }), axis = make("div", { class: "axis", "aria-hidden": "true" });
  const shown = make("span", { class: "dim", role: "status" });
  const tip = tooltip(place);
  const go = (from, to) => {
    const span = Math.min(stepSeconds, Math.max(to - from, stepSeconds * 1e-6));
    view.from = Math.max(0, Math.min(from, stepSeconds - span));
    view.to = view.from + span;
    tip.hide();
    draw();
  };
  const zoom = (factor, centre = (view.from + view.to) / 2) =>
    go(centre - (centre - view.from) / factor, centre + (view.to - centre) / factor);
  const move = (part) => go(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));
  const button = (text, label, click) => make("button", { type: "button", "aria-label": label, title: label, click }, text);

  /** The loops that take most of the step, with the start of their first iterations. */
  function loops(run, at, runs) {
    return run.spans.filter((s) => s.body && s.trips > 1 && s.seconds * runs > 0.04 * stepSeconds).flatMap((s) => {
      const phases = [...totals(s.body).phases].join(" and ");
      return [{ text: `${s.name.replace(/^loop over /, "")}: ${phases}`, from: at + s.start, seconds: s.body.seconds }, ...loops(s.body, at + s.start, runs * s.trips)];
    });
  }
  const jumps = loops(data, 0, 1).slice(0, 4).map(({ text, from, seconds }) =>
    button(text, `one iteration of ${text}`, () => go(from - 0.02 * seconds, from + 1.02 * seconds)));
  const controls = make("div", { class: "zoom", role: "toolbar", "aria-label": "zoom of the timeline" },
    button("−", "zoom out", () => zoom(1 / 2)), button("+", "zoom in", () => zoom(2)),
    button("‹", "earlier", () => move(-0.5)), button("›", "later", () => move(0.5)),
    button("whole step", "whole step", () => go(0, stepSeconds)),
    ...(jumps.length ? [make("span", { class: "dim" }, "one iteration of"), ...jumps] : []), shown);

  function draw() {
    rows.replaceChildren();
    const probe = make("div", { class: "row" }, make("span", {}, "compute"), make("div", { class: "lane" }));
    rows.append(probe);
    const width = probe.lastChild.clientWidth || 800, scale = width / (view.to - view.from);
    const { lanes, phases } = boxes(scale);
    const left = (t) => Math.max(-2, (t - view.from) * scale), right = (t) => Math.min(width + 2, (t - view.from) * scale);
    const row = (name, about, lane) => make("div", { class: "row" }, make("span", {}, make("b", {}, name), about && make("small", {}, about)), lane);
    const label = (texts, w) => texts.find((text) => textWidth(text) + 8 <= w) ?? "";
    const out = [];
    if (all.phases.size > 1) {
      const bands = phases.map(([start, end, name]) => {
        const x = left(start), w = right(end) - x, order = ["forward", "backward", "optimizer"].indexOf(name);
        return make("i", { class: order < 0 ? "cn" : `p${order}`, style: `left:${x}px;width:${w}px`, title: name }, label([name], w));
      });
      out.push(row("pass", "", make("div", { class: "lane phases", role: "img", "aria-label": `passes: ${[...new Set(phases.map((p) => p[2]))].join(", ")}` }, ...bands)));
    }
    for (const name of data.lanes) {
      const of = lanes[name], count = stacked(of), total = all.lanes[name] ?? { busy: 0, exposed: 0 };
      const high = 26, lane = make("div", { class: `lane${name === "compute" ? " kernels" : ""}`, role: "group", "aria-label": name, style: `height:${count * high}px` });
      if (name === "compute") {
        const [x, end] = [left(0), right(stepSeconds)];
        lane.append(make("span", { class: "waits", style: `left:${x}px;width:${end - x}px` }));
      }
      for (const box of of) {
        const x = left(box.start), w = Math.max(0.6, right(box.end) - x), share = Math.min(1, box.busy / (box.end - box.start || 1));
        const part = box.busy ? Math.min(1, box.exposed / box.busy) : 0, tall = box.loop || box.small ? Math.max(2, (high - 4) * share) : high - 4;
        const hidden = name !== "compute" && part < 1;
        const from = box.loop || box.small ? "0deg" : box.waitsFirst ? "90deg" : "270deg"; // the side of the exposed part
        const solid = part > (from === "270deg" ? 0.9 : 0.5); // under the beginning of the text
        const kind = `${box.css}${hidden ? (part ? ` partly${solid ? " solid" : ""}` : " hidden") : ""}${box.loop ? " loop" : ""}`;
        const text = tall > 12 ? label(box.labels, w) : "";
        lane.append(make("i", {
          class: kind, role: "img", "aria-label": box.tip.filter(Boolean).join("\n"), tabindex: -1, "data-start": box.start, "data-seconds": box.end - box.start,
          style: `left:${x}px;width:${w}px;top:${2 + box.row * high + (high - 4 - tall)}px;height:${tall}px;--part:${100 * part}%;--from:${from};line-height:${tall}px`,
        }, text));
      }
      lane.querySelector("i")?.setAttribute("tabindex", "0");
      const about = secondsText(total.busy) + (name === "compute" ? "" : total.exposed ? `, exposed ${secondsText(total.exposed)}` : ", hidden");
      out.push(row(name, about, lane));
    }
    rows.replaceChildren(...out);
    const step = roundStep((view.to - view.from) / Math.max(2, width / 110)) * 2, marks = [];
    const [unit, times] = view.to - view.from >= 1 ? ["s", 1] : view.to - view.from >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
    const digits = Math.max(0, -Math.floor(Math.log10(step * times) + 1e-9));
    for (let t = Math.ceil(view.from / step) * step; t <= view.to * (1 + 1e-12); t += step) {
      const x = (t - view.from) * scale;
      if (x < width - 24) marks.push(make("span", { style: `left:${x}px` }, `${(t * times).toFixed(digits)}${marks.length ? "" : ` ${unit}`}`));
    }
    axis.replaceChildren(make("span", {}), make("div", {}, ...marks));
    shown.textContent = view.to - view.from < stepSeconds * (1 - 1e-9) ? `${secondsText(view.from)} to ${secondsText(view.to)} of ${secondsText(stepSeconds)}` : `the step: ${secondsText(stepSeconds)}`;
  }

  const boxAt = (e) => e.target.closest?.(".lane > i[data-start]");
  const show = (box) => tip.show(box.getAttribute("aria-label").split("\n"), box.getBoundingClientRect());
  rows.addEventListener("pointerover", (e) => { const box = boxAt(e); if (box) show(box); else tip.hide(); });
  rows.addEventListener("pointerleave", () => tip.hide());
  rows.addEventListener("focusin", (e) => { const box = boxAt(e); if (box) show(box); });
  rows.addEventListener("focusout", () => tip.hide());
  rows.addEventListener("keydown", (e) => {
    const box = boxAt(e);
    if (!box) return;
    const lane = box.parentElement, all = [...lane.querySelectorAll("i")], k = all.indexOf(box);
    const next = all[{ ArrowRight: k + 1, ArrowLeft: k - 1, Home: 0, End: all.length - 1 }[e.key]];
    const middle = Number(box.dataset.start) + Number(box.dataset.seconds) / 2;
    const again = () => { // the box that is now at the middle of the old one
      const boxes = [...rows.querySelectorAll(`.lane[aria-label="${lane.getAttribute("aria-label")}"] i`)];
      const near = (b) => Math.abs(Number(b.dataset.start) + Number(b.dataset.seconds) / 2 - middle);
      boxes.sort((a, b) => near(a) - near(b))[0]?.focus();
    };
    if (e.key === "Escape") tip.hide();
    else if (e.key === "+" || e.key === "=") { zoom(2, middle); again(); }
    else if (e.key === "-" || e.key === "−") { zoom(1 / 2, middle); again(); }
    else if (e.key === "0") { go(0, stepSeconds); again(); }
    else if (next) { box.tabIndex = -1; next.tabIndex = 0; next.focus(); }
    else return;
    e.preventDefault();
  });

  let drag = null; // the seconds and the pixel at which the pointer went down, and the rectangle that is selected
  const at = (e) => {
    const lane = rows.querySelector(".lane.kernels").getBoundingClientRect();
    return { x: e.clientX - lane.left, t: view.from + (Math.max(0, Math.min(1, (e.clientX - lane.left) / lane.width))) * (view.to - view.from) };
  };
  rows.addEventListener("pointerdown", (e) => {
    if (e.button === 0 && e.pointerType !== "touch" && e.target.closest(".lane")) drag = { ...at(e), box: null };
  });
  rows.addEventListener("pointermove", (e) => {
    if (!drag) return;
    const { x } = at(e), lane = rows.querySelector(".lane.kernels");
    if (!drag.box && Math.abs(x - drag.x) > 5) {
      rows.setPointerCapture(e.pointerId);
      rows.append(drag.box = make("div", { class: "selected" }));
    }
    if (drag.box) {
      tip.hide();
      Object.assign(drag.box.style, { left: `${lane.offsetLeft + Math.min(x, drag.x)}px`, width: `${Math.abs(x - drag.x)}px` });
    }
  });
  const release = (e) => {
    const from = drag;
    drag = null;
    if (!from?.box) return;
    from.box.remove();
    const { t } = at(e);
    if (e.type === "pointerup" && t !== from.t) go(Math.min(t, from.t), Math.max(t, from.t));
  };
  rows.addEventListener("pointerup", release);
  rows.addEventListener("pointercancel", release);
  rows.addEventListener("dblclick", () => go(0, stepSeconds));
  place.prepend(controls, rows, axis);
  rows.setAttribute("role", "group");
  rows.setAttribute("aria-label", place.dataset.label);
  return draw;
}

/** Live bytes over the ops of a step, stacked by role, with the passes below and the capacity of the device. */
function drawMemory(place, data) {
  const order = ["parameters", "optimizer state", "other inputs", "constants", "gradients", "saved activations"];
  const rank = ([role]) => (order.includes(role) ? order.indexOf(role) : order.length);
  const points = data.points.map(([phase, name, source, ...bytes]) => ({ phase, name, source, bytes })), n = points.length;
  const highest = Math.max(...points.map(({ bytes }) => bytes.reduce((a, b) => a + b, 0))) || 1;
  const limit = data.capacity !== null && data.capacity < 3 * highest;
  const top = Math.max(1.12 * highest, limit ? 1.05 * data.capacity : 0);
  const [unit, size] = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]].find(([name, bytes]) => top >= (name === "GiB" ? 0.1 * bytes : bytes));
  const step = roundStep(top / size / 3.5) * size;
  const ticks = Array.from({ length: Math.floor(top / step) + 1 }, (_, k) => [k * step, k ? `${Number(((k * step) / size).toPrecision(6))} ${unit}` : "0"]);
  const x = (k) => (100 * k) / n, y = (bytes) => 100 - (100 * bytes) / top;
  const below = points.map(() => 0);
  const areas = data.roles.map((role, k) => [rank(role), k]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, role]) => {
    const [, css] = data.roles[role];
    const bottom = [...below];
    points.forEach((point, k) => { below[k] += point.bytes[role]; });
    const steps = (heights) => points.flatMap((_, k) => [`${x(k).toFixed(3)},${y(heights[k]).toFixed(3)}`, `${x(k + 1).toFixed(3)},${y(heights[k]).toFixed(3)}`]);
    return make("path", { class: css, d: `M${[...steps(below), ...steps(bottom).reverse()].join(" ")}Z` });
  });
  const peak = below.indexOf(Math.max(...below));
  const cursor = make("line", { class: "cursor", y1: 0, y2: 100, x1: -1, x2: -1 });
  const svg = make("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" }, ...areas,
    limit ? make("line", { class: "limit", x1: 0, x2: 100, y1: y(data.capacity), y2: y(data.capacity) }) : null, cursor);
  const side = x(peak) > 50 ? `right:${100 - x(peak + 1)}%` : `left:${x(peak)}%`;
  const marks = [
    ...ticks.map(([size, text]) => make("span", { class: "tick", style: `top:${y(size)}%` }, text)),
    make("span", { class: "mark", style: `${side};top:${y(below[peak])}%;transform:translateY(-108%)` }, `peak ${memoryText(highest)}`),
    limit && make("span", { class: "mark limit", style: `left:4px;top:${y(data.capacity)}%;transform:translateY(${y(data.capacity) > 12 ? -104 : 4}%)` }, `capacity ${memoryText(data.capacity)}`),
    !limit && data.capacity !== null && make("span", { class: "mark dim", style: "right:0" }, `capacity ${memoryText(data.capacity)} ↑`),
  ];
  const plot = make("div", {
    class: "plot", tabindex: 0, role: "slider", "aria-label": `${place.dataset.label}; the peak is ${memoryText(highest)}`, "aria-valuemin": 0, "aria-valuemax": n - 1, "aria-valuenow": peak,
  }, svg, ...marks.filter(Boolean));
  const bands = [];
  points.forEach(({ phase }, k) => {
    if (bands.at(-1)?.[2] === phase) bands.at(-1)[1] = k + 1; else bands.push([k, k + 1, phase]);
  });
  const strip = make("div", { class: "passes" });
  const kinds = data.roles.map(([role, css], k) => [role, css, points[peak].bytes[k]]).sort((a, b) => rank(a) - rank(b));
  const stack = make("div", { class: "stack", "aria-hidden": "true" }, ...kinds.filter(([, , size]) => size).map(([role, css, size]) =>
    make("i", { class: css, style: `flex:${size} 0 0`, title: `${role} ${memoryText(size)}` })));
  const legend = make("div", { class: "key" }, ...kinds.map(([role, css, size]) => make("span", { class: css }, make("i", {}), `${role}${size ? ` ${memoryText(size)}` : ": none at the peak"}`)));
  const axis = make("div", { class: "order dim" }, `${n} kernels, in the order in which they run →`);
  place.prepend(plot, strip, axis, make("h3", {}, `the peak${points[peak].source ? ` at ${points[peak].source}` : ""}`), stack, legend);
  const tip = tooltip(place);
  const show = (k) => {
    const { phase, name, source, bytes } = points[k], box = plot.getBoundingClientRect(), mid = box.left + (box.width * (k + 0.5)) / n;
    const order = bytes.map((size, role) => [size, data.roles[role][0]]).filter(([size]) => size).sort((a, b) => b[0] - a[0]);
    const lines = [`${memoryText(below[k])} after ${name} (${phase})`, ...order.map(([size, role]) => `${memoryText(size)} ${role}`), source];
    cursor.setAttribute("x1", x(k + 0.5));
    cursor.setAttribute("x2", x(k + 0.5));
    plot.setAttribute("aria-valuenow", k);
    plot.setAttribute("aria-valuetext", lines.join(", "));
    tip.show(lines, { left: mid + 8, top: box.top, bottom: box.top + 8 });
  };
  const hide = () => { tip.hide(); cursor.setAttribute("x1", -1); cursor.setAttribute("x2", -1); };
  const now = () => Number(plot.getAttribute("aria-valuenow"));
  plot.setAttribute("aria-valuetext", `peak: ${memoryText(highest)}`);
  plot.addEventListener("pointermove", (e) => {
    const box = plot.getBoundingClientRect();
    show(Math.max(0, Math.min(n - 1, Math.floor(((e.clientX - box.left) / box.width) * n))));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("focus", () => show(now()));
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (e) => {
    if (e.key === "Escape") return hide();
    const k = { ArrowRight: now() + 1, ArrowUp: now() + 1, ArrowLeft: now() - 1, ArrowDown: now() - 1, Home: 0, End: n - 1 }[e.key];
    if (k === undefined) return undefined;
    e.preventDefault();
    return show(Math.max(0, Math.min(n - 1, k)));
  });
  return () => {
    const width = plot.clientWidth || 800;
    strip.replaceChildren(...(bands.length < 2 ? [] : bands.map(([from, to, name]) => {
      const w = ((to - from) / n) * width;
      return make("i", { class: `p${["forward", "backward", "optimizer"].indexOf(name)}`, style: `width:${w}px`, title: name }, textWidth(name) + 8 <= w ? name : "");
    })));
  };
}

/** FLOP/s against FLOPs per byte, on logarithmic axes, under the roof of the chip. */
function drawRoofline(place, data) {
  const view = make("div", {});
  place.prepend(view);
  const tip = tooltip(place);
  const groups = new Map(), all = { name: "the step", flops: 0, bytes: 0, seconds: data.seconds };
  for (const [name, flops, bytes, seconds] of data.points) {
    const group = groups.get(name) ?? { name, flops: 0, bytes: 0, seconds: 0 };
    groups.set(name, { name, flops: group.flops + flops, bytes: group.bytes + bytes, seconds: group.seconds + seconds });
    all.flops += flops;
    all.bytes += bytes;
  }
  const longest = [...groups.values()].filter(({ flops }) => flops).sort((a, b) => b.seconds - a.seconds).slice(0, 12);
  const points = [all, ...longest].map((p) => ({ ...p, intensity: p.flops / p.bytes, rate: p.flops / p.seconds }));
  const ridge = data.flops / data.bandwidth, roof = (i) => Math.min(data.flops, i * data.bandwidth);
  const each = (of) => points.map((point) => point[of]);
  const xs = [Math.min(...each("intensity"), ridge / 4) / 1.6, Math.max(...each("intensity"), ridge * 4) * 1.6];
  const ys = [Math.min(...each("rate"), data.flops / 8) / 1.6, data.flops * 1.8];
  const rate = (n) => `${Number((n / 1e12).toPrecision(3))} TFLOP/s`;
  const ticks = ([a, b]) => { // powers of ten, with 2 and 5 between them where there are few
    const within = (leads) => Array.from({ length: 40 }, (_, k) => leads.map((lead) => lead * 10 ** (k - 6))).flat().filter((p) => p >= a && p <= b);
    return within([1]).length > 3 ? within([1]) : within([1, 2, 5]);
  };
  return () => {
    const width = Math.min(place.clientWidth || 800, 760), height = Math.max(220, Math.min(300, width * 0.42));
    const [l, r, t, b] = [width < 480 ? 64 : 86, width - 8, 22, height - 34];
    const X = (i) => l + ((r - l) * Math.log(i / xs[0])) / Math.log(xs[1] / xs[0]), Y = (f) => b - ((b - t) * Math.log(f / ys[0])) / Math.log(ys[1] / ys[0]);
    const text = (x, y, string, more = {}) => make("text", { x, y, "font-size": 11, fill: "var(--dim)", ...more }, string);
    const grid = [
      ...ticks(xs).flatMap((p) => [make("line", { x1: X(p), x2: X(p), y1: t, y2: b, class: "grid" }), text(X(p), b + 14, `${p >= 1e4 ? p.toExponential(0).replace("+", "") : Number(p.toPrecision(1))}`, { "text-anchor": "middle" })]),
      ...ticks(ys).flatMap((p) => [make("line", { x1: l, x2: r, y1: Y(p), y2: Y(p), class: "grid" }), text(l - 6, Y(p) + 4, rate(p), { "text-anchor": "end" })]),
    ];
    const left = Math.max(xs[0], ys[0] / data.bandwidth);
    const roofLine = make("path", { class: "roof", d: `M${X(left)} ${Y(roof(left))}L${X(ridge)} ${Y(data.flops)}H${r}` });
    const circles = points.map((point, k) => {
      const size = k ? 3 + 9 * Math.sqrt(point.seconds / points[0].seconds) : 7;
      const lines = [`${point.name}: ${secondsText(point.seconds)}`, `${Number(point.intensity.toPrecision(3))} FLOPs per byte, ${rate(point.rate)}`,
        `${(100 * point.rate / roof(point.intensity)).toFixed(0)} % of the roof, ${(100 * point.rate / data.flops).toFixed(0)} % of the peak`,
        k ? (point.intensity < ridge ? "left of the ridge: HBM traffic bounds it" : "right of the ridge: the matrix unit bounds it") : "with all communication that is exposed"];
      const circle = make("circle", { cx: X(point.intensity), cy: Y(point.rate), r: size, class: k ? "op" : "step", tabindex: 0, role: "img", "aria-label": lines.join(", ") });
      const show = () => tip.show(lines, circle.getBoundingClientRect());
      circle.addEventListener("pointerenter", show);
      circle.addEventListener("focus", show);
      circle.addEventListener("pointerleave", () => tip.hide());
      circle.addEventListener("blur", () => tip.hide());
      return circle;
    });
    const at = points[0], near = X(at.intensity) > r - 90;
    const svg = make("svg", { class: "roofline", viewBox: `0 0 ${width} ${height}`, style: `width:${width}px;height:${height}px`, role: "group", "aria-label": place.dataset.label },
      ...grid, roofLine, ...circles.slice(1), circles[0],
      text(X(ridge) + 4, Y(data.flops) - 7, `${data.chip}: ${rate(data.flops)}`),
      text(X(at.intensity) + (near ? -12 : 12), Y(at.rate) + 4, "the step", { fill: "var(--ink)", "font-weight": 600, "text-anchor": near ? "end" : "start" }),
      text(4, 12, "FLOP/s of a device"), text(r, height - 4, "FLOPs per byte of HBM traffic", { "text-anchor": "end" }));
    view.replaceChildren(svg);
  };
}

const MAX_NUMBERED_TICKS = 64; // longer pictures of pipelines have bars in place of numbered slots

/** The slots of the stages of a pipeline: a row per stage with a line for each of its loops, a column per tick; idle slots are empty. */
function drawPipeline(place, data) {
  const numbered = data.ticks <= MAX_NUMBERED_TICKS, [w, h, gap] = [20, 13, 4], high = data.loops.length * h + gap, head = numbered ? 15 : 0, cells = [];
  const rect = (x, y, width, more = {}) => make("rect", { x, y, width, height: h - 1, ...more });
  data.loops.forEach(({ kind: [colour, name], start, rows }, i) => rows.forEach((slots, stage) => {
    const y = head + stage * high + i * h;
    cells.push(rect(start * w, y, slots.length * w, { class: "idle" }));
    for (let at = 0; at < slots.length; at++) {
      if (!slots[at]) continue;
      const [microbatch, round] = slots[at], from = at;
      if (numbered) {
        const text = `stage ${stage}, tick ${start + at}: ${name} slot of microbatch ${microbatch}${data.rounds > 1 ? `, round ${round}` : ""}`;
        cells.push(make("g", { class: `p${colour}${round % 2 ? " late" : ""}` }, make("title", {}, text), rect((start + at) * w, y, w - 1),
          make("text", { x: (start + at) * w + w / 2 - 0.5, y: y + h - 4 }, `${microbatch}`)));
      } else {
        while (slots[at + 1]) at += 1;
        cells.push(make("g", { class: `p${colour}` }, rect((start + from) * w, y, (at - from + 1) * w)));
      }
    }
  }));
  for (let tick = 0; tick < data.ticks && head; tick++) cells.push(make("text", { class: "tick", x: (tick + 0.5) * w, y: 10 }, `${tick}`));
  const width = data.ticks * w, tall = head + data.stages * high;
  const svg = make("svg", { viewBox: `0 0 ${width} ${tall}`, preserveAspectRatio: "none", role: "img", "aria-label": place.dataset.label, style: `height:${tall}px;width:${numbered ? `${width}px` : "100%"}` }, ...cells);
  const labels = [...(head ? [make("span", { style: `height:${head}px;line-height:${head}px` }, "tick")] : []), ...Array.from({ length: data.stages }, (_, k) => make("span", { style: `height:${high}px` }, `stage ${k}`))];
  const kinds = [...new Map(data.loops.map(({ kind: [colour, name] }) => [`p${colour}`, name.replace("recomputed ", "")])), ["idle", "idle"]];
  place.prepend(
    make("div", { class: "slots" }, make("div", { "aria-hidden": "true" }, ...labels),
      make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "slots of the stages at each tick" }, svg)),
    make("div", { class: "key" }, ...kinds.map(([css, name]) => make("span", { class: css }, make("i", {}), name)), numbered ? make("span", {}, "numbers in slots: microbatches") : null));
  return () => {};
}

/** Planned and measured seconds as pairs of bars of one scale; a measured bar is red above `data.ratio` times the planned one. */
function drawPairs(place, data) {
  const longest = Math.max(...data.rows.flatMap(([, planned, measured]) => [planned, measured]));
  const bars = data.rows.flatMap(([name, planned, measured]) => [barRow(name, [["ink", planned, "planned"]], longest, secondsText(planned)),
    barRow("", [[measured > data.ratio * planned ? "wait" : "c0", measured, "measured"]], longest, `${secondsText(measured)}, ${(measured / planned).toFixed(2)} ×`)]);
  const kinds = [["ink", "planned"], ["c0", "measured"], ["wait", `measured, more than ${data.ratio} × the plan`]];
  place.prepend(make("div", { class: "parts pairs" }, ...bars), make("div", { class: "key" }, ...kinds.map(([css, name]) => make("span", { class: css }, make("i", {}), name))));
  return () => {};
}

/** Seconds as bars of one scale: (label, seconds, segments), where a segment is (CSS class, seconds, label). */
function drawParts(place, rows) {
  const longest = Math.max(...rows.map(([, seconds]) => seconds)) || 1;
  place.prepend(make("div", { class: "parts" }, ...rows.map(([label, seconds, segments]) => barRow(label, segments, longest, secondsText(seconds)))));
  return () => {};
}

/** A label, a bar of segments on a track of `longest` seconds, and a text. */
function barRow(label, segments, longest, text) {
  const bars = segments.filter(([, seconds]) => seconds > 0).map(([css, seconds, of]) =>
    make("i", { class: css, style: `width:${(100 * seconds) / longest}%`, title: `${of}: ${secondsText(seconds)}` }));
  return make("div", {}, make("span", {}, label), make("span", { class: "track" }, ...bars), make("span", { class: "n" }, text));
}
