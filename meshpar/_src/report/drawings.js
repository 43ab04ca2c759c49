// Drawings of plan pages, from the data of the report: mesh axes on the chips.

/** `8 along y, a ring, stride 2: 2 groups share each link`. */
function stageText({ dim, size, stride, wraps, fills, nodes }) {
  const off = { slice: nodes ? "over the network between nodes" : "over DCN", switch: "on the switch", core: "in the chip" }[dim];
  if (fills.length || !dim) return `${size} in a ring through several dimensions`;
  if (off) return `${size} ${off}`;
  return `${size} along ${dim}, a ${wraps ? "ring" : "line"}${stride > 1 ? `, stride ${stride}: ${stride} groups share each link` : ""}`;
}

/** The table of the axes: placement, bytes and seconds of their collectives. */
function torusTable(rows, timed) {
  const cells = (tag, ...of) => of.slice(0, 4 + timed).map(([content, css]) => make(tag, { class: css }, ...[content].flat()));
  return make("div", { class: "wide" }, make("table", {},
    make("thead", {}, make("tr", {}, ...cells("th", ["axes"], ["placement"], ["sent", "n"], ["busiest link", "n more"], ["time", "n"]))),
    make("tbody", {}, ...rows.map((row, k) => make("tr", { "data-row": k, tabindex: 0 }, ...cells("td",
      [row.axes.map((axis, i) => make("span", { class: `chip on ${row.colours[i]}` }, axis))],
      [row.stages.map((stage) => make("div", {}, `${stageText(stage)}: ${bytesText(stage.bytes)} each way`))],
      [bytesText(row.sent), "n"], [bytesText(Math.max(0, ...row.stages.map((stage) => stage.bytes))), "n more"], [secondsText(row.seconds), "n"]))))));
}

/** Draw the chips and the links that the axes of each row of the table use; the rows and the chips choose a group. */
function drawTorus(picture, { extent, rings, rows, timed }) {
  for (const stage of rows.flatMap((row) => row.stages)) stage.nodes = extent.switch > 1;
  const place = make("div", { class: "chips" }), section = make("div", { class: "torus" }, place, torusTable(rows, timed));
  picture.prepend(section);
  for (const row of rows) Object.assign(row, { colour: row.colours[0], stages: row.stages.filter((stage) => stage.dim && !stage.fills.length) });
  const solid = extent.z > 1, nodes = extent.switch > 1, boxes = extent.slice;
  const total = extent.x * extent.y * extent.z;
  const cap = (n, most) => Math.min(n, most);
  const size = nodes ? { x: cap(extent.switch, 16), y: 1, z: 1 } : Object.fromEntries(["x", "y", "z"].map((d) => [d, solid && total > 1024 ? cap(extent[d], 8) : extent[d]]));
  const shownBoxes = cap(boxes, nodes ? 8 : 4), cores = extent.core;
  const step = nodes ? 34 : solid ? 40 : 24, chip = nodes ? 18 : 10, depth = { x: 21, y: -15 };
  const top = (boxes > 1 ? 34 : 12) + (solid ? -depth.y * (size.z - 1) : 0), left = 26, bottom = nodes ? 40 : 26;
  const box = { width: left + step * size.x + (solid ? depth.x * (size.z - 1) : 0) + 14, height: top + step * size.y + bottom };
  const across = cap(shownBoxes, nodes && shownBoxes > 2 ? 2 : 2), down = Math.ceil(shownBoxes / across);
  const width = box.width * across + (boxes > 1 ? 14 : 0), height = box.height * down;
  const colour = (row) => `var(--${row.colour === "cn" ? "none" : row.colour.replace("c", "a")})`;
  const key = (at) => `${at.x},${at.y},${at.z},${at.core},${at.slice}`;
  const drawn = (at) => at.x < size.x && at.y < size.y && at.z < size.z && at.slice < shownBoxes;
  let base = { x: 0, y: 0, z: 0, core: 0, slice: 0 };
  const dimOf = (stage) => (stage.dim === "switch" ? "x" : stage.dim);
  const lengthOf = (dim) => (nodes && dim === "x" ? extent.switch : extent[dim]);

  /** The center of a device in the drawing. */
  function center(at) {
    const bx = (at.slice % across) * box.width + (boxes > 1 ? 14 : 0), by = Math.floor(at.slice / across) * box.height;
    return {
      x: bx + left + step * (at.x + 0.5) + (solid ? depth.x * at.z : 0) + (cores > 1 ? (at.core - 0.5) * chip : 0),
      y: by + top + step * (at.y + 0.5) + (solid ? depth.y * at.z : 0),
    };
  }

  /** The devices of the group of `at` along some stages. */
  function members(at, stages) {
    let out = [{ ...at }];
    for (const { dim: d, size: n, stride, ...stage } of stages) {
      const dim = dimOf({ dim: d });
      out = out.flatMap((one) => {
        const digit = Math.floor(one[dim] / stride) % n;
        return Array.from({ length: n }, (_, k) => ({ ...one, [dim]: one[dim] + (k - digit) * stride }));
      });
    }
    return out;
  }

  /** The path of the message of a device to the next one of its stage; "" if it has none, null if it is not drawn. */
  function hop(at, stage) {
    const from = center(at), dim = dimOf(stage), digit = Math.floor(at[dim] / stage.stride) % stage.size, half = chip / 2;
    if (!drawn(at)) return null;
    if (stage.dim === "slice") return `M${from.x + 2} ${from.y - half}V${Math.floor(at.slice / across) * box.height + 17}`;
    if (stage.dim === "switch") return `M${from.x} ${from.y + half}v${step / 2}`;
    const way = dim === "x" ? { x: 1, y: 0 } : dim === "y" ? { x: 0, y: 1 } : { x: depth.x / Math.hypot(depth.x, depth.y), y: depth.y / Math.hypot(depth.x, depth.y) };
    if (digit === stage.size - 1) {
      if (!stage.wraps) return "";
      const first = center({ ...at, [dim]: at[dim] - digit * stage.stride }), out = step * 0.42;
      const bend = stage.stride > 1 ? Math.min(5, 1 + stage.stride) : 0;
      const [px, py] = [Math.abs(way.y) * bend, -Math.abs(way.x) * bend];
      return `M${from.x + way.x * half + px} ${from.y + way.y * half + py}l${way.x * out} ${way.y * out}` +
        `M${first.x - way.x * half + px} ${first.y - way.y * half + py}l${-way.x * out} ${-way.y * out}`;
    }
    const next = { ...at, [dim]: at[dim] + stage.stride };
    if (!drawn(next)) return null;
    const to = center(next);
    if (dim === "core") return `M${from.x} ${from.y - half}q${chip / 2} -5 ${chip} 0`;
    if (stage.stride === 1) return `M${from.x + way.x * half} ${from.y + way.y * half}L${to.x - way.x * half} ${to.y - way.y * half}`;
    const bend = Math.min(step * 0.85, 8 + stage.stride * 1.5), [px, py] = [way.y === 0 ? 0 : Math.abs(way.y), way.x === 0 ? 0 : -Math.abs(way.x)];
    const [sx, sy] = [px * half * 0.8, py * half * 0.8];
    return `M${from.x + sx} ${from.y + sy}Q${(from.x + to.x) / 2 + px * bend} ${(from.y + to.y) / 2 + py * bend} ${to.x + sx} ${to.y + sy}`;
  }

  const most = Math.max(1, ...rows.flatMap((row) => row.stages.map((stage) => stage.bytes)));
  const everyDevice = [];
  for (let slice = 0; slice < shownBoxes; slice++) for (let z = size.z - 1; z >= 0; z--) for (let y = 0; y < size.y; y++) for (let x = 0; x < size.x; x++)
    for (let core = 0; core < cores; core++) everyDevice.push({ x, y, z, core, slice });
  const single = rows.filter((row) => row.axes.length === 1);

  /** The boxes of slices or nodes, their switches and the network, and the links of the torus. */
  function ground() {
    const out = [], links = [];
    for (let k = 0; k < shownBoxes; k++) {
      const x = (k % across) * box.width + (boxes > 1 ? 14 : 0), y = Math.floor(k / across) * box.height;
      if (boxes > 1) {
        out.push(make("rect", { x: x + 4, y: y + 12, width: box.width - 10, height: 5, rx: 2.5, fill: "var(--none)" }),
          make("text", { x: x + 6, y: y + 9, "font-size": 9.5, fill: "var(--dim)" }, `${nodes ? "node" : "slice"} ${k}, ${nodes ? "NICs to the network" : "DCN"}`),
          make("path", { d: `M6 ${y + 14.5}H${x + 6}`, stroke: "var(--none)", "stroke-width": 2 }));
        if (k % across === 0 && k + across < shownBoxes) out.push(make("path", { d: `M6 ${y + 14.5}v${box.height}`, stroke: "var(--none)", "stroke-width": 2 }));
      }
      if (nodes) {
        const at = center({ x: 0, y: 0, z: 0, core: 0, slice: k });
        out.push(make("rect", { x: at.x - chip / 2, y: at.y + chip / 2 + step / 2, width: step * (size.x - 1) + chip, height: 14, rx: 3, fill: "var(--soft)", stroke: "var(--none)" }),
          make("text", { x: at.x - chip / 2 + 6, y: at.y + chip / 2 + step / 2 + 10.5, "font-size": 9.5, fill: "var(--dim)" }, "NVSwitch"));
      }
    }
    if (!nodes) {
      for (const at of everyDevice) if (!at.core) ["x", "y", "z"].forEach((dim, k) => {
        if (extent[dim] > 1) links.push(hop(at, { dim, size: extent[dim], stride: 1, wraps: rings[k] }));
      });
      const last = center({ x: size.x - 1, y: size.y - 1, z: 0, core: 0, slice: 0 }), first = center({ x: 0, y: 0, z: 0, core: 0, slice: 0 });
      const label = (x, y, text, more) => make("text", { x, y, "font-size": 10.5, fill: "var(--dim)", "text-anchor": "middle", ...more }, text);
      const side = (dim) => `${dim} ${extent[dim]}${size[dim] < extent[dim] ? `, the first ${size[dim]}` : ""}`;
      if (extent.x > 1) out.push(label((first.x + last.x) / 2, last.y + step * 0.5 + 13, side("x")));
      if (extent.y > 1) out.push(label(first.x - step * 0.5 - 10, (first.y + last.y) / 2, side("y"), { transform: `rotate(-90 ${first.x - step * 0.5 - 10} ${(first.y + last.y) / 2})` }));
      if (solid) {
        const back = center({ x: size.x - 1, y: size.y - 1, z: size.z - 1, core: 0, slice: 0 });
        out.push(label((last.x + back.x) / 2 + 20, (last.y + back.y) / 2 + 14, side("z")));
      }
    }
    return [make("path", { d: links.filter(Boolean).join(""), stroke: "var(--line)", fill: "none", "stroke-width": 1 }), ...out];
  }

  /** Links of all groups of a row, pale. */
  const pale = (row) => row.stages.map((stage) => make("path", {
    d: everyDevice.map((at) => hop(at, stage)).filter(Boolean).join(""), stroke: colour(row), fill: "none", "stroke-width": 1.2, opacity: stage.dim === "slice" ? 0.15 : 0.3,
  }));

  /** Links of the group of the chosen device, a path for each link of the group. */
  function strong(row) {
    return row.stages.flatMap((stage) => members(base, row.stages).map((at) => [at, hop(at, stage)]).filter(([, d]) => d).map(([, d]) => make("path", {
      d, class: "hop", stroke: colour(row), fill: "none", "stroke-linecap": "round", "stroke-width": 1.6 + 3.4 * (stage.bytes / most),
      "data-axes": row.axes.join("+"), "data-stage": row.stages.indexOf(stage), "data-bytes": stage.bytes,
    }, make("title", {}, `${row.axes.join("+")}: ${stageText(stage)}: ${bytesText(stage.bytes)} each way on a link`))));
  }

  function draw(chosen) {
    const shown = chosen == null ? single : [rows[chosen]];
    const inGroup = new Map();
    for (const row of shown) for (const at of members(base, row.stages)) if (!inGroup.has(key(at))) inGroup.set(key(at), colour(row));
    const devices = everyDevice.map((at) => {
      const { x, y } = center(at), own = key(at) === key(base), w = cores > 1 ? chip - 2 : solid && !own && !inGroup.has(key(at)) ? chip - 4 : chip;
      return make("rect", {
        x: x - w / 2, y: y - (cores > 1 ? chip : w) / 2, width: w, height: cores > 1 ? chip : w, rx: 2, fill: own ? "var(--ink)" : inGroup.get(key(at)) ?? "var(--page)",
        stroke: own ? "var(--ink)" : inGroup.get(key(at)) ?? "var(--none)", "stroke-width": 1, class: inGroup.has(key(at)) ? "device on" : "device",
        click: () => { base = at; draw(chosen); },
      }, make("title", {}, ["x", "y", "z", "core", "slice"].filter((d) => (nodes && d === "x") || extent[d] > 1).map((d) => `${nodes ? { x: "GPU", slice: "node" }[d] : d} ${at[d]}`).join(", ")));
    });
    const boxName = nodes ? "nodes" : "slices";
    place.replaceChildren(make("svg", { viewBox: `0 0 ${width} ${height}`, style: `max-width:${Math.max(300, Math.min(width * 1.4, 620))}px`, role: "img",
      "aria-label": single.map((row) => `${row.axes[0]}: ${row.stages.map(stageText).join(", ")}`).join("; ") },
      ...ground(), ...shown.flatMap(pale), ...shown.flatMap(strong), ...devices),
    ...(shownBoxes < boxes ? [make("p", { class: "dim" }, `the first ${shownBoxes} of ${boxes} ${boxName}`)] : []));
  }
  for (const row of section.querySelectorAll("tr[data-row]")) {
    const k = Number(row.dataset.row);
    row.addEventListener("pointerenter", () => draw(k));
    row.addEventListener("pointerleave", () => draw());
    row.addEventListener("focus", () => draw(k));
    row.addEventListener("blur", () => draw());
  }
  draw();
  return () => {};
}

/** The nodes of a layer in order: its input, parts of the model, and collectives between them; each with the dims of the arrays that it reads.
 *  The ops of a module are one part, unless a node between them would read and feed it. An op without a path that reads a weight is of the weight's
 *  module; one that does not is in the part that it reads, and begins a part if it reads several. Without modules each matmul of a weight begins a part. */
function layerNodes({ inputs, weights, steps, dims }) {
  const start = { path: "", ops: [], sends: [], weights: new Map(), sources: new Map() }, nodes = [start];
  const made = new Map(inputs.map((shard) => [shard, start])), stored = new Map(weights.map(([shard, path]) => [shard, { shard, path, sends: [] }]));
  const stream = new Set(inputs), sums = new Set(); // the residual stream, and its sums
  const add = (node) => { nodes.push(node); return node; };
  const after = (node, other) => [...node.sources.keys()].some((source) => source === other || after(source, other));
  const read = (node, shards) => shards.forEach((shard) => {
    const weight = stored.get(shard);
    if (weight) node.weights.set(weight.shard, node.weights.get(weight.shard)?.length ? node.weights.get(weight.shard) : weight.sends);
    else if (made.has(shard) && made.get(shard) !== node && !node.sources.has(made.get(shard))) node.sources.set(made.get(shard), shard);
  });
  const readers = new Map(); // of a shard: the parts that read it, also what is sent of it
  for (const step of [...steps].reverse()) {
    const parts = step.moves ? step.makes.flatMap((shard) => [...(readers.get(shard) ?? [])]) : [step.path];
    step.reads.forEach((shard) => readers.set(shard, new Set([...(readers.get(shard) ?? []), ...parts])));
  }
  for (const step of steps) {
    const active = step.reads.filter((shard) => made.has(shard)), kept = step.reads.map((shard) => stored.get(shard)).find(Boolean);
    if (!active.length && !kept) continue; // constants
    if (step.moves ? !step.sends.length : !step.op) {
      step.makes.forEach((shard, k) => {
        if (made.has(step.reads[k])) made.set(shard, made.get(step.reads[k]));
        if (stream.has(step.reads[k])) stream.add(shard);
        if (stored.has(step.reads[k])) stored.set(shard, stored.get(step.reads[k]));
      });
    } else if (!active.length) { // a weight, or a value computed from it alone
      step.makes.forEach((shard) => stored.set(shard, { ...kept, sends: [...kept.sends, ...step.sends] }));
    } else {
      const sources = new Set(active.map((shard) => made.get(shard))), path = step.path || (kept?.path ?? "");
      const is = (one) => one.ops.length && !sums.has(one), carried = active.every((shard) => stream.has(shard));
      const ends = [...sources].filter((one) => ![...sources].some((other) => other !== one && after(other, one)));
      const sum = !step.moves && !step.path && step.op === "add" && active.length === 2 && active.some((shard) => stream.has(shard));
      const same = !step.moves && !step.sends.length && sources.size === 1;
      const shared = /^convert_element_type\b/.test(step.op) && step.makes.some((shard) => readers.get(shard)?.size > 1); // equal casts of several parts
      if (same && (shared || /^name(_dims)?$/.test(step.op) || (!path && !is(ends[0]) && /^(convert_element_type|reshape)\b/.test(step.op)))) { // the same array
        step.makes.forEach((shard) => { made.set(shard, ends[0]); if (carried) stream.add(shard); });
        continue;
      }
      let node = null;
      if (path) {
        node = nodes.filter((one) => one.path === path).at(-1);
        if (!node && !step.path && ends.length === 1 && is(ends[0]) && !ends[0].path && !ends[0].ops.some((op) => op.matmul)) (node = ends[0]).path = path; // a norm up to its scale
      } else if (!step.moves && !sum && !(step.matmul && kept)) {
        node = ends.length === 1 && is(ends[0]) ? ends[0] : carried ? nodes.find((one) => is(one) && !one.path && one.sources.size === sources.size && [...sources].every((source) => one.sources.has(source))) : null;
      }
      if (!node || [...sources].some((source) => source !== node && after(source, node))) node = add({ path, ops: [], sends: [], weights: new Map(), sources: new Map() });
      if (sum) { sums.add(node); step.makes.forEach((shard) => stream.add(shard)); }
      if (!step.moves) node.ops.push(step);
      node.sends.push(...step.sends);
      read(node, step.moves ? active : step.reads);
      step.makes.forEach((shard) => made.set(shard, node));
    }
  }
  const shown = nodes.filter((node) => node === start || node.sources.size);
  const paths = shown.filter((node) => node.ops.length && node.path).map((node) => node.path.split("/"));
  const first = paths[0] ?? [], common = first.filter((_, k) => paths.every((path) => first.slice(0, k + 1).every((part, j) => path[j] === part))).length; // parts of all paths
  const gate = ([op, colour, axes, bytes, seconds, exposed, why]) => {
    const waits = exposed == null ? "" : exposed < 0.01 * seconds ? ", hidden" : `, ${secondsText(exposed)} of it exposed`;
    return { text: op, colour, axes, bytes, hidden: exposed != null && exposed < 0.5 * seconds, waits, why, cost: bytesText(bytes) + (seconds ? `, ${secondsText(seconds)}` : "") };
  };
  const attends = ({ path, ops }) => !path && ops.filter((op) => op.matmul).length > 1 && ops.some(({ op }) => op === "exp");
  const timed = steps.some((step) => step.seconds);
  const nameOf = (path) => (path.slice(-2).join("/").length < 16 ? path.slice(-2).join("/") : path.at(-1) ?? ""); // as wide as a box
  return shown.map((node) => {
    const main = node.ops.find((op) => op.matmul) ?? node.ops.find(({ op }) => op !== "name" && op !== "convert_element_type") ?? node.ops[0];
    const seconds = node.ops.reduce((sum, op) => sum + op.seconds, 0), path = node.path.split("/");
    return {
      name: (node.ops.length && nameOf(path.slice(common))) || (attends(node) && "attention") || main?.title || "", part: node.ops.length > 0,
      about: [node.path, main?.source].filter(Boolean).join("\n"), time: seconds ? secondsText(seconds) : timed && node.ops.length ? "fused" : "", gates: node.sends.map(gate),
      weights: [...node.weights].map(([shard, sends]) => ({ dims: dims[shard], gates: sends.map(gate) })),
      sources: [...node.sources].filter(([source]) => shown.includes(source)).map(([source, shard]) => [shown.indexOf(source), dims[shard]]),
    };
  });
}

/** Draw a layer: its parts from top to bottom, in two columns where there is space, wires with dims, collectives as pills. */
function drawLayer(place, data) {
  const nodes = layerNodes(data), script = place.firstChild;
  place.classList.add("layer");
  return () => place.replaceChildren(script, ...(nodes.length > 2 && nodes.length <= 60 ? [layerPicture(place, nodes), layerKey(nodes)] : [make("p", { class: "dim" }, "The layer is not drawn: it has too few or too many parts.")]));
}

/** The legend of a layer: the colours of its axes, and how collectives that kernels wait for differ from hidden ones. */
function layerKey(nodes) {
  const dims = nodes.flatMap((node) => [...node.weights.flatMap((w) => w.dims), ...node.sources.flatMap(([, of]) => of)]);
  const gates = nodes.flatMap((node) => [...node.gates, ...node.weights.flatMap((w) => w.gates)]);
  const of = new Map();
  for (const [c, axes] of [...dims.filter(([, , axes]) => axes).map(([, c, axes]) => [c, axes]), ...gates.map((gate) => [gate.colour, gate.axes])]) of.set(c, (of.get(c) || new Set()).add(axes));
  const kinds = [...of].map(([c, axes]) => [c, `${[...axes].join(", ")}: sharded dims, collectives`]);
  if (gates.some((gate) => gate.hidden)) kinds.push(["ink hidden", "pale: most of it overlaps with kernels"]);
  if (gates.some((gate) => !gate.hidden)) kinds.push(["ink", gates.some((gate) => gate.hidden) ? "solid: exposed, kernels wait for most of it" : "exposed: kernels wait for most of it"]);
  return make("div", { class: "key" }, ...kinds.map(([css, name]) => make("span", { class: css }, make("i", {}), name)),
    make("span", {}, "pill: bytes that a device sends, time"), nodes.some((node) => node.time === "fused") && make("span", {}, "fused: computed in the kernels of other boxes"));
}

function layerPicture(place, nodes) {
  const FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace", CHAR = 6.7, LINE = 14, WIDTH = 138, GAP = 8, LEFT = 30, RIGHT = 8, PILL = 37;
  const ink = (c) => `var(--${c === "cn" ? "none" : c.replace("c", "a")})`;
  const words = (dims) => (dims.length ? dims.map(([name, c, axes]) => ({ text: axes ? `${name}:${axes}` : name, c })) : [{ text: "scalar", c: "cn" }]);

  /** Words of dims in lines of at most `width` pixels. */
  function wrapped(dims, width) {
    const lines = [[]];
    let used = 0;
    for (const word of words(dims)) {
      const length = (word.text.length + 1) * CHAR;
      if (used + length > width + CHAR && lines.at(-1).length) { lines.push([]); used = 0; }
      lines.at(-1).push(word);
      used += length;
    }
    return lines;
  }
  const dimLines = (lines, x, y, anchor) => lines.map((line, k) => {
    const text = make("text", { x, y: y + LINE * k, "font-size": 11, "font-family": FONT, "text-anchor": anchor, class: "dims" });
    line.forEach((word, i) => text.append(make("tspan", { fill: word.c === "cn" ? "var(--dim)" : ink(word.c), "font-weight": word.c === "cn" ? 400 : 700 }, (i ? " " : "") + word.text)));
    if (anchor !== "middle") return text;
    const length = (line.map((word) => word.text).join(" ").length + 1) * CHAR; // over a wire, which is not to be seen between its words
    return make("g", {}, make("rect", { x: x - length / 2, y: y + LINE * k - 11, width: length, height: LINE, fill: "var(--page)" }), text);
  });
  /** The name of a part, in lines that fit into its box. */
  const titleLines = (node) => node.name.split(" ").reduce((lines, word) => {
    const last = lines.at(-1), joined = last ? `${last} ${word}` : word;
    return joined.length <= 16 || !last ? [...lines.slice(0, -1), joined] : [...lines, word];
  }, [""]);
  const gateText = (gate) => `${gate.text} ${gate.cost}`;
  /** A collective: on a wire in one line, in a box of the part whose weights it gathers in two. */
  function pill(gate, x, y, width, lines = 1) {
    const fill = ink(gate.colour), lit = gate.hidden ? `color-mix(in srgb, ${fill} 22%, var(--page))` : fill;
    const text = { "font-size": 11.5, "text-anchor": "middle", fill: gate.hidden ? "var(--ink)" : "var(--page)" };
    const op = make("tspan", { "font-weight": 650 }, gate.text);
    return make("g", { class: "gate", "data-op": gate.text, "data-axes": gate.axes, "data-bytes": gate.bytes },
      make("rect", { x: x - width / 2, y, width, height: lines === 1 ? 22 : PILL - 4, rx: 10, fill: lit, stroke: fill, "stroke-width": 1.5 }),
      ...(lines === 1 ? [make("text", { x, y: y + 15, ...text }, op, ` ${gate.cost}`)] : [make("text", { x, y: y + 14, ...text }, op), make("text", { x, y: y + 28, ...text }, gate.cost)]),
      make("title", {}, `${gate.text} over ${gate.axes}: ${gate.cost}${gate.waits}\n${gate.why}`));
  }

  // levels: a node is below its sources; a collective is directly above its first reader
  const level = nodes.map(() => 0), readers = nodes.map(() => []);
  nodes.forEach((node, k) => {
    for (const [source, dims] of node.sources) { level[k] = Math.max(level[k], level[source] + 1); readers[source].push([k, dims]); }
  });
  const isGate = (node) => !node.part;
  const isSum = (node) => node.name === "add" && !node.weights.length && !node.gates.length;
  const single = nodes.map((_, k) => level.filter((other) => other === level[k]).length === 1);
  const size = nodes.map((node, k) => {
    if (k === 0) return { w: 96, h: 22 };
    if (isGate(node) && !single[k]) return { w: WIDTH, h: PILL * node.gates.length - 4 };
    if (isGate(node)) return { w: Math.max(...node.gates.map((gate) => gateText(gate).length * 6.4 + 24)), h: 22 + 25 * (node.gates.length - 1) };
    if (isSum(node)) return { w: 24, h: 24 };
    const rows = node.weights.reduce((n, w) => n + wrapped(w.dims, WIDTH - 16).length * LINE + w.gates.length * PILL + 5, 0);
    return { w: WIDTH, h: (node.time ? 42 : 28) + LINE * (titleLines(node).length - 1) + rows + node.gates.length * PILL };
  });
  const levels = [];
  nodes.forEach((_, k) => (levels[level[k]] ??= []).push(k));

  // two columns: the second one begins after the single part nearest to the middle that all later ones read through
  const wide = (place.clientWidth || 1100) >= 780;
  const height = levels.map((of) => Math.max(...of.map((k) => size[k].h)));
  const total = height.reduce((a, b) => a + b + 40, 0);
  let cut = levels.length;
  if (wide && levels.length > 7) {
    let at = 0, best = Infinity;
    levels.forEach((of, k) => {
      at += height[k] + 40;
      const passes = of.length === 1 && nodes.every((node, later) => level[later] <= k || node.sources.every(([source]) => level[source] >= k));
      if (passes && nodes[of[0]].part && k < levels.length - 1 && Math.abs(at - total / 2) < best) { best = Math.abs(at - total / 2); cut = k + 1; }
    });
  }
  const across = (of) => Math.max(1, ...of.map((level) => level.length)), space = [levels.slice(0, cut), levels.slice(cut)].map((of) => Math.max(across(of) * (WIDTH + GAP) - GAP, 370));
  const begin = [LEFT, LEFT + space[0] + RIGHT + LEFT];
  const at = nodes.map(() => null), bottoms = [0, 0];
  levels.forEach((of, k) => {
    const column = k < cut ? 0 : 1;
    if (k === cut) bottoms[1] = 44;
    const y = bottoms[column] + (k === 0 ? 6 : 0), middle = begin[column] + space[column] / 2;
    of.forEach((node, i) => { at[node] = { x: middle + (i - (of.length - 1) / 2) * (WIDTH + GAP), y, column }; });
    const labels = Math.max(1, ...of.map((node) => (readers[node].length ? wrapped(readers[node][0][1], of.length > 1 ? WIDTH : space[column] / 2 - 8).length : 1)));
    bottoms[column] = y + height[k] + 22 + LINE * labels;
  });

  const wires = [], labels = [], boxes = [];
  const wire = (d) => wires.push(make("path", { d, fill: "none", stroke: "var(--none)", "stroke-width": 1.4 }));
  const top = { x: begin[1] + space[1] / 2, y: 14 };
  const crossing = cut < levels.length ? levels[cut - 1][0] : -1;
  nodes.forEach((node, k) => node.sources.forEach(([source]) => {
    const crossed = source === crossing && at[k].column === 1;
    const from = crossed ? { x: top.x, y: top.y } : { x: at[source].x, y: at[source].y + size[source].h }, to = at[k];
    const direct = crossed ? level[k] === cut : level[k] - level[source] === 1;
    if (direct) {
      const mid = to.y - 10;
      wire(from.x === to.x ? `M${from.x} ${from.y}V${to.y}` : `M${from.x} ${from.y}V${mid - 8}Q${from.x} ${mid} ${from.x + Math.sign(to.x - from.x) * 8} ${mid}H${to.x - Math.sign(to.x - from.x) * 8}Q${to.x} ${mid} ${to.x} ${to.y}`);
    } else { // around the parts between them, at the left
      const left = begin[to.column] - LEFT / 2, middle = to.y + size[k].h / 2;
      wire(`M${from.x} ${from.y + 6}H${left + 8}Q${left} ${from.y + 6} ${left} ${from.y + 14}V${middle - 8}Q${left} ${middle} ${left + 8} ${middle}H${to.x - size[k].w / 2}`);
    }
  }));
  const name = (k, text) => make("text", { x: at[k].x, y: at[k].y + 17, "font-size": 13, "font-weight": 650, "text-anchor": "middle", fill: "var(--ink)" }, text);
  nodes.forEach((node, k) => {
    const { x, y } = at[k], { w, h } = size[k];
    if (k === 0) boxes.push(name(k, "input of the layer"));
    else if (isGate(node)) node.gates.forEach((gate, i) => boxes.push(single[k] ? pill(gate, x, y + 25 * i, w) : pill(gate, x, y + PILL * i, w, 2)));
    else if (isSum(node)) boxes.push(make("circle", { cx: x, cy: y + 12, r: 11, fill: "var(--page)", stroke: "var(--ink)" }), make("text", { x, y: y + 17.5, "font-size": 17, "text-anchor": "middle", fill: "var(--ink)" }, "+"));
    else {
      const box = make("g", { class: "part" }, make("title", {}, node.about), make("rect", { x: x - w / 2, y, width: w, height: h, rx: 7, fill: "var(--soft)", stroke: "var(--ink)", "stroke-width": 1.2 }),
        ...titleLines(node).map((line, i) => make("text", { x: x - w / 2 + 9, y: y + 18 + LINE * i, "font-size": 13, "font-weight": 650, fill: "var(--ink)" }, line)));
      const under = y + LINE * (titleLines(node).length - 1);
      box.append(make("text", { x: x - w / 2 + 9, y: under + 33, "font-size": 11.5, fill: "var(--dim)" }, node.time));
      let down = under + (node.time ? 49 : 35);
      for (const weight of node.weights) {
        const lines = wrapped(weight.dims, WIDTH - 16);
        box.append(...dimLines(lines, x - w / 2 + 9, down, "start"));
        down += LINE * lines.length - 5;
        for (const gate of weight.gates) { box.append(pill(gate, x, down, WIDTH - 10, 2)); down += PILL; }
        down += 10;
      }
      for (const gate of node.gates) { box.append(pill(gate, x, down - 9, WIDTH - 10, 2)); down += PILL; }
      boxes.push(box);
    }
    const [first] = readers[k];
    const many = levels[level[k]].length > 1;
    if (first) labels.push(...dimLines(wrapped(first[1], many ? WIDTH : space[at[k].column] / 2 - 8), many ? x : x + 8, y + h + 15, many ? "middle" : "start"));
  });
  if (crossing >= 0) {
    const dims = readers[crossing].find(([k]) => at[k].column === 1)[1];
    labels.push(make("circle", { cx: top.x, cy: top.y, r: 4, fill: "var(--none)" }), ...dimLines(wrapped(dims, space[1] / 2 - 10), top.x + 10, top.y + 4, "start"));
    const below = at[crossing].y + size[crossing].h;
    wire(`M${at[crossing].x} ${below}v${12 + LINE * wrapped(dims, space[0] / 2 - 8).length}`);
    labels.push(make("text", { x: at[crossing].x + 8, y: below + 16 + LINE * wrapped(dims, space[0] / 2 - 8).length, "font-size": 11.5, fill: "var(--dim)" }, "continues at the right"));
  }
  const sum = nodes.findLastIndex((node, k) => isSum(node) && !readers[k].length), last = sum < 0 ? level.lastIndexOf(Math.max(...level)) : sum;
  wire(`M${at[last].x} ${at[last].y + size[last].h}v16`);
  const width = begin[+(cut < levels.length)] + space[+(cut < levels.length)] + RIGHT, right = at[last].x + 130 < width;
  labels.push(make("text", { x: at[last].x + (right ? 8 : -8), y: at[last].y + size[last].h + 16, "font-size": 11.5, "text-anchor": right ? "start" : "end", fill: "var(--dim)" }, "output of the layer"));
  const tall = Math.max(...bottoms) + 8;
  return make("svg", { viewBox: `0 0 ${width} ${tall}`, width, style: "max-width:100%;height:auto", role: "img", "aria-label": place.dataset.label },
    ...wires, ...labels, ...boxes);
}

/** The step times of plans, and the peaks of a device, as bars with their parts. */
function drawBars(place, sides) {
  const kinds = new Map();
  const bars = (title, text, of) => {
    const shown = sides.filter(of), total = (side) => of(side).reduce((sum, [, , n]) => sum + n, 0), longest = Math.max(...shown.map(total)) || 1;
    shown.flatMap(of).forEach(([css, name]) => kinds.set(css, name));
    return shown.length ? [make("div", { class: "parts bars" }, make("div", {}, title), ...shown.map((side) =>
      make("div", {}, make("span", {}, side.name), make("span", { class: "track" }, ...of(side).map(([css, name, n]) => make("i", { class: css, style: `width:${(100 * n) / longest}%`, title: `${name}: ${text(n)}` }))),
        make("span", { class: "n" }, text(total(side))))))] : [];
  };
  const seconds = (side) => side.seconds && [["ink", "kernels", side.seconds[0]], ["wait", "exposed communication", side.seconds[1]]];
  place.prepend(...bars("step", secondsText, seconds), ...bars("peak memory of a device", memoryText, (side) => side.memory),
    make("div", { class: "key" }, ...[...kinds].map(([css, name]) => make("span", { class: css }, make("i", {}), name))));
  return () => {};
}

/** The days of runs as bars with their parts; and the share of time that is not productive by the time between saves, with a dot for the shortest run and a circle for the longest interval. */
function drawRuns(place, { kinds, rows }) {
  const total = ({ parts }) => parts.reduce((a, b) => a + b, 0), days = (n) => `${Number(n.toPrecision(3))} days`;
  const longest = Math.max(...rows.map(total)), view = make("div", {});
  const bars = rows.map((row) => make("div", {}, make("span", {}, row.name),
    make("span", { class: "track" }, ...row.parts.map((n, k) => make("i", { class: kinds[k][0], style: `width:${(100 * n) / longest}%`, title: `${kinds[k][1]}: ${days(n)}` }))),
    make("span", { class: "n" }, days(total(row)))));
  place.prepend(make("div", { class: "parts" }, ...bars),
    make("div", { class: "key" }, ...kinds.map(([css, name]) => make("span", { class: css }, make("i", {}), name))), view);
  const every = rows.flatMap((row) => row.curve.map(([x]) => x));
  const xs = [Math.min(...every), Math.max(...every)], top = Math.min(1, Math.max(...rows.flatMap(({ best, longest: at }) => [4 * best[1], 1.2 * at[1]]))) || 1;
  const ticks = [[1, "s", 60], [60, "min", 3600], [3600, "h", 86400], [86400, "d", Infinity]].flatMap(([scale, unit, below]) =>
    [1, 3, 10, 30].map((k) => [k * scale, `${k} ${unit}`]).filter(([x]) => x < below && x >= xs[0] && x <= xs[1]));
  const step = roundStep(top / 4), percent = (y, digits = 2) => `${Number((100 * y).toPrecision(digits))} %`;
  return () => {
    const width = Math.min(place.clientWidth || 800, 760), height = 260, [l, r, t, b] = [width < 480 ? 44 : 66, width - 8, 22, height - 34];
    const X = (x) => l + ((r - l) * Math.log(x / xs[0])) / (Math.log(xs[1] / xs[0]) || 1), Y = (y) => b - ((b - t) * y) / top;
    const text = (x, y, string, more = {}) => make("text", { x, y, "font-size": 11, fill: "var(--dim)", ...more }, string);
    const levels = Array.from({ length: 9 }, (_, k) => k * step).filter((y) => y <= top);
    const lines = rows.flatMap(({ name, curve, best, longest: at }, k) => {
      const colour = `var(--a${k % 6})`, path = curve.filter(([, y]) => y <= top).map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
      const label = `${name}: ${percent(best[1])} for the shortest run, ${percent(at[1])} for the longest interval`;
      return [make("path", { d: path, fill: "none", stroke: colour, "stroke-width": 1.5 }),
        make("circle", { cx: X(best[0]), cy: Y(best[1]), r: 4.5, fill: colour, role: "img", "aria-label": label }, make("title", {}, label)),
        make("circle", { cx: X(at[0]), cy: Y(at[1]), r: 4.5, fill: "none", stroke: colour, "stroke-width": 2 }),
        make("circle", { cx: l + 12, cy: t + 8 + 16 * k, r: 4.5, fill: colour }), text(l + 22, t + 12 + 16 * k, label, { fill: "var(--ink)" })];
    });
    view.replaceChildren(make("svg", { class: "roofline", viewBox: `0 0 ${width} ${height}`, style: `width:${width}px;height:${height}px`, role: "group", "aria-label": place.dataset.label },
      ...ticks.filter((_, k) => width >= 480 || k % 2).flatMap(([x, name]) => [make("line", { x1: X(x), x2: X(x), y1: t, y2: b, class: "grid" }), text(X(x), b + 14, name, { "text-anchor": "middle" })]),
      ...levels.flatMap((y) => [make("line", { x1: l, x2: r, y1: Y(y), y2: Y(y), class: "grid" }), text(l - 6, Y(y) + 4, percent(y), { "text-anchor": "end" })]),
      ...lines, text(l - 40, 12, "not productive"), text(r, height - 4, "time between saves", { "text-anchor": "end" })));
  };
}
