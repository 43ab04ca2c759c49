// The script of plan pages, and of the sections of plans in a lab: enhance() adds controls to the HTML of the report.

const SVG = document.createRange().createContextualFragment("<svg></svg>").firstChild.namespaceURI;

/** An element. Attributes that are functions are listeners; children are elements or texts. */
function make(tag, attributes = {}, ...children) {
  const out = /^(svg|svg:a|rect|path|text|circle|g|line|title)$/.test(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") out.addEventListener(name, value);
    else if (value === true) out.setAttribute(name, "");
    else if (value !== false && value != null) out.setAttribute(name, value);
  }
  out.append(...children.filter((child) => child != null));
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
  root.querySelectorAll(".time").forEach(tooltips);
  root.querySelectorAll(".tensors").forEach((section) => choosable(section, kept));
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

/** A tooltip for the boxes of a timeline, by pointer or keyboard: Tab to a lane, then the arrow keys. */
function tooltips(time) {
  const tip = make("div", { class: "tip", hidden: true });
  time.closest(".wide").after(tip);
  const show = (box) => {
    tip.replaceChildren(...box.getAttribute("aria-label").split("\n").map((line) => make("div", {}, line)));
    tip.hidden = false;
    const at = box.getBoundingClientRect(), width = document.documentElement.clientWidth;
    tip.style.left = `${Math.max(8, Math.min(at.left, width - tip.offsetWidth - 8))}px`;
    tip.style.top = at.bottom + tip.offsetHeight + 8 < innerHeight ? `${at.bottom + 4}px` : `${at.top - tip.offsetHeight - 4}px`;
  };
  for (const lane of time.querySelectorAll(".lane")) {
    const boxes = [...lane.querySelectorAll("i")];
    boxes.forEach((box, k) => {
      box.tabIndex = k ? -1 : 0;
      box.addEventListener("pointerenter", () => show(box));
      box.addEventListener("pointerleave", () => { tip.hidden = true; });
      box.addEventListener("focus", () => show(box));
      box.addEventListener("blur", () => { tip.hidden = true; });
      box.addEventListener("keydown", (e) => {
        if (e.key === "Escape") tip.hidden = true;
        const next = boxes[{ ArrowRight: k + 1, ArrowLeft: k - 1, Home: 0, End: boxes.length - 1 }[e.key]];
        if (!next) return;
        e.preventDefault();
        box.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
      });
    });
  }
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
