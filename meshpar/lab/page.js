// The page of a lab. It draws the controls and requests everything else from a session: served() over HTTP, the default export over
// the connection of a notebook's kernel.

const AXES = ["data", "model", "context", "expert", "third", "fourth"];

/** An element. Attributes that are functions are listeners; children are elements or texts. */
function make(tag, attributes = {}, ...children) {
  const out = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") out.addEventListener(name, value);
    else if (value === true) out.setAttribute(name, "");
    else if (value !== false && value != null) out.setAttribute(name, value);
  }
  out.append(...children.filter((child) => child != null));
  return out;
}

const meshText = (sizes) => sizes.map(([axis, n]) => `${axis}=${n}`).join(", ");
const divisors = (n) => [...Array(n).keys()].map((k) => k + 1).filter((k) => n % k === 0);

/** A rule as its dims and its axes: "heads, mlp: model" → ["heads, mlp", ["model"]]. */
function halves(text) {
  const rule = text.split("#")[0];
  const at = rule.lastIndexOf(":");
  if (at < 0) return [rule.trim(), []];
  const axes = rule.slice(at + 1).split("+").map((axis) => axis.trim()).filter((axis) => axis && axis !== "none");
  return [rule.slice(0, at).trim(), axes];
}

/** A text whose `parts` are code. */
const words = (text) => text.split("`").map((part, k) => (k % 2 ? make("code", {}, part) : part));

/** Rules as text, one per line, disabled ones after a "#"; and the inverse. */
const asText = (rules) => rules.map(({ text, on }) => (on ? text : `# ${text}`)).join("\n");
const asRules = (text) =>
  text.split("\n").flatMap((line) => {
    const off = line.trim().match(/^#\s*(.*:.*)$/);
    if (off) return [{ text: off[1], on: false }];
    return line.split("#")[0].split(";").map((rule) => rule.trim()).filter(Boolean).map((rule) => ({ text: rule, on: true }));
  });

/** Put the page into an element.
 *  @param ask request → promise of the reply */
export function mount(root, ask) {
  const state = { topology: null, mesh: "", rules: [], pinned: null };
  let sizes = [], colours = {}, dims = [], shown = null, past = [], asking = false, again = null, asText_ = false;

  // -- the frame

  const title = make("span", { class: "mono" });
  const statusLine = make("p", { class: "status", role: "status", "aria-live": "polite" });
  const start = make("div", { class: "start" });
  const suggest = make("button", { type: "button", class: "primary", click: () => search() }, "Search for a better layout");
  const searched = make("span", { class: "dim" });
  const topology = make("input", {
    class: "mono", spellcheck: "false", "aria-label": "topology", placeholder: "v5e:16x16", size: "14",
    change: () => { remember(); state.topology = topology.value.trim() || null; plan({ fit: true }); fillStart(); },
  });
  const bar = make("div", { class: "mesh", role: "group", "aria-label": "factors of the mesh" });
  const meshInput = make("input", {
    class: "mono wide", spellcheck: "false", "aria-label": "mesh", input: () => { state.mesh = meshInput.value; plan(); },
    focus: () => remember(),
  });
  const meshError = make("div", { class: "error", role: "alert", hidden: true });
  const list = make("ol", { class: "rules", "aria-label": "rules, in order" });
  const text = make("textarea", {
    class: "mono wide", spellcheck: "false", rows: "8", "aria-label": "layout as text", hidden: true,
    focus: () => remember(), input: () => { state.rules = asRules(text.value); plan(); },
  });
  const layoutError = make("div", { class: "error", role: "alert", hidden: true });
  const more = make("div", { class: "more-dims" });
  const button = (label, click, about) => make("button", { type: "button", click, title: about }, label);
  const undo = button("Undo", () => back(), "restore the previous layout and mesh");
  const textButton = make("button", { type: "button", "aria-pressed": "false", click: () => toggleText() }, "As text");
  const pin = button("Pin", () => togglePin(), "keep this plan, and compare others with it");
  const copyLayout = button("Copy layout", () => copy(shown?.layout, copyLayout), "the layout as one line");
  const copyPython = button("Copy Python", () => copy(shown?.python, copyPython), "the mesh, the layout and the call of mp.jit");
  const compile = button("Compile this", () => compileThis(), "run the real compiler, which takes seconds to minutes");
  const cards = make("div", { class: "metrics", "aria-label": "metrics of the plan" });
  const compiled = make("section", { hidden: true });
  const part = (heading, about) => {
    const body = make("div");
    const section = make("section", {}, make("h2", {}, heading), about ? make("p", { class: "dim" }, about) : null, body);
    return { body, section };
  };
  const panels = {
    diff: part("Compared with the pinned plan", "a: the pinned plan; b: this plan."),
    parts: part("Step time", "All bars have the same scale. The estimate overlaps kernels and collectives."),
    rules: part("Effect of each rule"),
    layer: part("One layer"),
    memory: part("Memory per device"),
    collectives: part("Largest collectives", "Bytes are sent by each device."),
    notes: part("Notes"),
  };
  panels.diff.section.hidden = true;
  root.replaceChildren(
    make("header", {}, make("h1", {}, "meshpar lab ", title),
      make("p", { class: "dim" }, "Edit the mesh and the rules: the numbers update at once. They are the plan's estimates; nothing is compiled " +
        "or run until you ask for it.")),
    make("div", { class: "bench" },
      make("div", { class: "controls" },
        make("section", {}, make("h2", {}, "Start from"), start, make("p", { class: "row" }, suggest, searched)),
        make("section", {}, make("h2", {}, "Mesh"), make("label", { class: "row dim" }, "of ", topology), bar, meshInput, meshError),
        make("section", {}, make("h2", {}, "Layout"),
          make("p", { class: "dim" }, "In order: an axis goes to the first rule whose dim is present."),
          list, text, layoutError, more,
          make("p", { class: "row" }, undo, textButton, pin, copyLayout, copyPython, compile), statusLine)),
      make("div", { class: "results" }, cards, compiled, ...Object.values(panels).map((panel) => panel.section))),
  );

  // -- state

  const snapshot = () => JSON.stringify({ topology: state.topology, mesh: state.mesh, rules: state.rules });
  function remember() {
    const now = snapshot();
    if (past.at(-1) !== now) past.push(now);
    if (past.length > 200) past.shift();
  }
  function back() {
    while (past.length && past.at(-1) === snapshot()) past.pop();
    if (past.length) use(JSON.parse(past.pop()));
  }
  function use(draft) {
    Object.assign(state, draft);
    topology.value = state.topology ?? "";
    drawRules();
    plan();
  }

  // -- the plan: one request at a time, then one for the newest draft

  async function plan(options = {}) {
    if (asking) { again = { ...again, ...options }; return; }
    asking = true;
    root.setAttribute("aria-busy", "true");
    const { topology: where, mesh, rules, pinned } = state;
    const reply = await ask({ ask: "plan", topology: where, mesh, rules, pinned, ...options }).catch((e) => ({ failed: `${e}` }));
    asking = false;
    if (again) { const next = again; again = null; if (!options.fit || next.fit) return plan(next); }
    show(reply, options);
  }

  function show(reply, options) {
    root.setAttribute("aria-busy", "false");
    if (reply.failed) { say(reply.failed); root.classList.add("stale"); return; }
    if (options.fit && reply.mesh) state.mesh = reply.mesh;
    if (document.activeElement !== meshInput) meshInput.value = state.mesh;
    if (reply.plan) colours = reply.plan.colours;
    if (reply.sizes) {
      sizes = reply.sizes;
      sizes.forEach(([axis], k) => { colours[axis] = `c${k % 6}`; });
      if (drag == null) drawMesh(); // a seam that is being dragged stays
    }
    wrong(meshError, reply.errors.mesh);
    wrong(layoutError, reply.errors.layout ?? (asText_ ? reply.errors.rules.find(Boolean) : null));
    [...list.children].forEach((row, k) => row.update?.(reply, k));
    offerDims();
    shown = reply.plan ? { ...reply.plan, mesh: reply.mesh, topology: state.topology } : null;
    root.classList.toggle("stale", !shown);
    for (const b of [pin, copyLayout, copyPython, compile]) b.disabled = !shown;
    if (!shown) { say("the numbers belong to the last layout that could be planned"); return; }
    cards.innerHTML = shown.html.cards;
    for (const [name, { body, section }] of Object.entries(panels)) {
      body.innerHTML = shown.html[name];
      section.hidden = !shown.html[name];
    }
    pin.textContent = state.pinned ? "Unpin" : "Pin";
    root.dataset.metrics = JSON.stringify(shown.metrics);
    root.dataset.milliseconds = reply.ms;
    markStart();
    say("");
  }

  function wrong(place, error) {
    place.hidden = !error;
    place.replaceChildren();
    if (!error) return;
    place.append(make("b", {}, ...words(error.headline)));
    for (const [what, fact] of Object.entries(error.facts ?? {})) place.append(make("div", { class: "mono" }, `${what} ${fact}`));
    if (error.fixes?.length) place.append(make("ul", {}, ...error.fixes.map((fix) => make("li", {}, ...words(fix)))));
  }
  function say(text) { if (statusLine.textContent !== text) statusLine.textContent = text; }

  // -- rules

  function drawRules() {
    list.replaceChildren(...state.rules.map((rule) => drawRule(rule)));
    text.value = asText(state.rules);
  }
  const reorder = () => {
    state.rules = [...list.children].map((row) => row.rule);
    text.value = asText(state.rules);
    plan();
  };

  function drawRule(rule) {
    const input = make("input", {
      class: "mono", value: rule.text, spellcheck: "false", "aria-label": "rule", focus: () => remember(),
      input: () => { rule.text = input.value; text.value = asText(state.rules); plan(); },
    });
    const on = make("input", {
      type: "checkbox", "aria-label": "enable the rule",
      change: () => { remember(); rule.on = on.checked; text.value = asText(state.rules); plan(); },
    });
    on.checked = rule.on;
    const grip = make("button", {
      type: "button", class: "grip", title: "drag, or press the arrow keys",
      keydown: (e) => {
        const neighbour = { ArrowUp: row.previousElementSibling, ArrowDown: row.nextElementSibling }[e.key];
        if (!(e.key === "ArrowUp" || e.key === "ArrowDown")) return;
        e.preventDefault();
        if (!neighbour) return;
        remember();
        if (e.key === "ArrowUp") row.after(neighbour); else row.before(neighbour); // moving the neighbour keeps the focus
        reorder();
        say(`rule ${[...list.children].indexOf(row) + 1} of ${list.children.length}`);
      },
      pointerdown: (e) => {
        e.preventDefault();
        grip.focus();
        grip.setPointerCapture(e.pointerId);
        remember();
        row.classList.add("dragged");
      },
      pointermove: (e) => {
        if (!row.classList.contains("dragged")) return;
        const middle = (other) => { const box = other.getBoundingClientRect(); return box.top + box.height / 2; };
        const { previousElementSibling: above, nextElementSibling: below } = row;
        if (above && e.clientY < middle(above)) { row.after(above); reorder(); }
        else if (below && e.clientY > middle(below)) { row.before(below); reorder(); }
      },
      pointerup: () => row.classList.remove("dragged"),
      pointercancel: () => row.classList.remove("dragged"),
    }, "⠿");
    const axes = make("span", { class: "axes", role: "group", "aria-label": "axes of the rule" });
    const drop = make("button", {
      type: "button", class: "drop", title: "remove the rule",
      click: () => {
        remember();
        const next = row.nextElementSibling ?? row.previousElementSibling;
        row.remove();
        reorder();
        (next?.querySelector(".drop") ?? undo).focus();
      },
    }, "×");
    const does = make("div", { class: "does dim" });
    const error = make("div", { class: "error", role: "alert", hidden: true });
    const row = make("li", {}, grip, on, input, drop, does, axes, error);
    row.rule = rule;

    const toggleAxis = (axis) => {
      remember();
      const [left, right] = halves(rule.text);
      const next = right.includes(axis) ? right.filter((a) => a !== axis) : [...right, axis];
      rule.text = input.value = `${left}: ${next.join("+") || "none"}`;
      text.value = asText(state.rules);
      plan();
    };
    row.update = (reply, k) => {
      const axesOfRule = reply.axes[k] ?? halves(rule.text)[1];
      for (const [what, label] of [[grip, "move the rule"], [on, "enable the rule"], [drop, "remove the rule"]])
        what.setAttribute("aria-label", `${label} ${rule.text}`);
      row.classList.toggle("off", !rule.on);
      row.style.setProperty("--rule", `var(--${(colours[axesOfRule[0]] ?? "cn").replace("c", "a").replace("an", "none")})`);
      const had = document.activeElement?.parentElement === axes ? document.activeElement.textContent : null;
      axes.replaceChildren(...sizes.map(([axis]) => make("button", {
        type: "button", class: `chip ${axesOfRule.includes(axis) ? "on" : ""} ${colours[axis] ?? "cn"}`, title: `shard over ${axis}, or not`,
        "aria-pressed": `${axesOfRule.includes(axis)}`, click: () => toggleAxis(axis),
      }, axis)));
      if (had) [...axes.children].find((chip) => chip.textContent === had)?.focus();
      wrong(error, reply.errors.rules[k]);
      input.setAttribute("aria-invalid", `${!error.hidden}`);
      const effect = reply.plan?.rules[k];
      if (!rule.on) does.textContent = "off";
      else if (effect) does.textContent = effect.text;
      does.classList.toggle("past", rule.on && !effect);
    };
    return row;
  }

  /** The dims of the program that no rule names, as buttons that add a rule. */
  function offerDims() {
    const ruled = new Set(state.rules.flatMap(({ text: rule }) => halves(rule)[0].split(",").map((dim) =>
      dim.trim().replace(/\?$/, "").replace(/^.*\./, ""))));
    const left = dims.filter(([dim]) => !ruled.has(dim));
    const focused = more.contains(document.activeElement);
    more.replaceChildren(make("span", { class: "dim" }, "add a rule for"), ...left.map(([dim, lengths]) => make("button", {
      type: "button", class: "chip", title: `${dim} ${lengths.join(" or ")}`,
      click: () => add(`${dim}?: ${sizes.at(-1)?.[0] ?? "data"}`),
    }, dim)), make("button", { type: "button", class: "chip", "aria-label": "add an empty rule", click: () => add("") }, "…"));
    if (focused) more.querySelector("button")?.focus();
  }
  function add(rule) {
    remember();
    state.rules.push({ text: rule, on: true });
    list.append(drawRule(state.rules.at(-1)));
    text.value = asText(state.rules);
    list.lastElementChild.querySelector("input.mono").focus();
    plan();
  }
  function toggleText() {
    asText_ = !asText_;
    textButton.setAttribute("aria-pressed", `${asText_}`);
    text.hidden = !asText_;
    list.hidden = more.hidden = asText_;
    drawRules();
    if (asText_) text.focus();
    plan();
  }

  // -- the mesh: a bar with one part per axis; moving a seam changes the sizes of two axes

  const SMALL = 1.1; // the width of an axis of size 1, in factors of two
  const width = (n) => Math.log2(n) + SMALL;

  function drawMesh() {
    const had = document.activeElement?.dataset?.seam;
    const parts = [];
    sizes.forEach(([axis, n], k) => {
      if (k) parts.push(seam(k - 1));
      parts.push(make("div", { class: `axis-part ${colours[axis] ?? "cn"}`, style: `flex: ${width(n)} 1 0` },
        make("b", {}, `${n}`), make("span", {}, axis), sizes.length > 1 && n === 1 ? make("button", {
          type: "button", class: "drop", "aria-label": `remove axis ${axis}`, title: "remove the axis",
          click: () => { remember(); setSizes(sizes.filter((_, i) => i !== k)); },
        }, "×") : null));
    });
    const name = AXES.find((axis) => !sizes.some(([a]) => a === axis));
    parts.push(make("button", {
      type: "button", class: "add-axis", title: "add an axis; drag its seam to give it devices", "aria-label": `add axis ${name}`,
      click: () => { remember(); setSizes([...sizes, [name, 1]]); },
    }, "+ axis"));
    bar.replaceChildren(...parts);
    if (had != null) bar.querySelector(`[data-seam="${had}"]`)?.focus();
  }
  function setSizes(next) {
    sizes = next;
    state.mesh = meshInput.value = meshText(sizes);
    plan();
  }
  /** The seam between two axes: a slider over the divisors of their devices. */
  function seam(k) {
    const [[left, n], [right, m]] = [sizes[k], sizes[k + 1]];
    const choices = divisors(n * m);
    const put = (size) => {
      if (size === sizes[k][1]) return;
      setSizes(sizes.map(([axis, old], i) => [axis, i === k ? size : i === k + 1 ? (n * m) / size : old]));
    };
    const slide = (e) => {
      const [a, b] = [handle.previousElementSibling.getBoundingClientRect(), handle.nextElementSibling.getBoundingClientRect()];
      const at = (e.clientX - a.left) / (b.right - a.left);
      const place = (size) => width(size) / (width(size) + width((n * m) / size));
      put(choices.reduce((best, size) => (Math.abs(place(size) - at) < Math.abs(place(best) - at) ? size : best)));
      resize(k);
    };
    const resize = () => [...bar.querySelectorAll(".axis-part")].forEach((box, i) => {
      box.style.flex = `${width(sizes[i][1])} 1 0`;
      box.querySelector("b").textContent = sizes[i][1];
    });
    const handle = make("div", {
      class: "seam", role: "slider", tabindex: "0", "data-seam": k, "aria-orientation": "horizontal", title: "drag, or press the arrow keys",
      "aria-label": `devices along ${left} and ${right}`, "aria-valuemin": 1, "aria-valuemax": n * m, "aria-valuenow": n,
      "aria-valuetext": `${left} ${n}, ${right} ${m}`,
      keydown: (e) => {
        const at = choices.indexOf(sizes[k][1]);
        const to = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1, Home: 0, End: choices.length - 1 }[e.key];
        if (to == null) return;
        e.preventDefault();
        remember();
        put(choices[Math.max(0, Math.min(choices.length - 1, to))]);
        drawMesh();
      },
      pointerdown: (e) => { e.preventDefault(); handle.focus(); remember(); handle.setPointerCapture(e.pointerId); drag = k; },
      pointermove: (e) => { if (drag === k) slide(e); },
      pointerup: () => { drag = null; drawMesh(); },
      pointercancel: () => { drag = null; drawMesh(); },
    });
    return handle;
  }
  let drag = null;

  // -- known layouts, the search, the compiler

  /** Start a job and poll it; `report` gets every state. Resolves to the last one. */
  async function job(request, report) {
    const begun = await ask(request);
    if (begun.failed) return { failed: { headline: begun.failed } };
    for (;;) {
      const now = await ask({ ask: "job", job: begun.job });
      report(now, begun.job);
      if (now.failed && !now.running) return typeof now.failed === "string" ? { failed: { headline: now.failed } } : now;
      if (now.failed || !now.running) return now;
      await new Promise((done) => setTimeout(done, 250));
    }
  }

  let begin = [];
  function drawStart() {
    const rank = (row) => [row.fits === false, row.seconds ?? 0, row.peak];
    const rows = [...begin].sort((x, y) => { const [a, b] = [rank(x), rank(y)]; const k = a.findIndex((v, i) => v !== b[i]); return k < 0 ? 0 : a[k] - b[k]; });
    start.replaceChildren(make("table", {}, make("thead", {}, make("tr", {},
      make("th", { scope: "col" }, "layout, mesh"), make("th", { scope: "col", class: "n" }, "step"), make("th", { scope: "col", class: "n" }, "peak"))),
    make("tbody", {}, ...rows.map((row) => {
      const line = make("tr", {}, make("td", {}, make("button", {
        type: "button", class: "link", title: row.layout,
        click: () => {
          remember();
          use({ mesh: row.mesh, rules: row.rules.map((rule) => ({ text: rule, on: true })) });
        },
      }, row.name), make("span", { class: "dim" }, ` ${row.mesh.replaceAll("=", " ").replaceAll(", ", " × ")}`)),
      make("td", { class: "n" }, row.texts[0]), make("td", { class: `n ${row.fits === false ? "up" : ""}`, title: row.fits === false ? "does not fit" : "" }, row.texts[1]));
      line.row = row;
      return line;
    }))));
    markStart();
  }
  function markStart() {
    for (const line of start.querySelectorAll("tbody tr")) {
      const { mesh, layout } = line.row;
      const same = state.mesh === mesh && asText(state.rules.filter((r) => r.on)).replaceAll("\n", "; ") === layout.replaceAll("\n", "; ");
      line.classList.toggle("now", same);
      if (same) line.setAttribute("aria-current", "true"); else line.removeAttribute("aria-current");
    }
  }
  async function fillStart() {
    const where = state.topology;
    begin = [];
    suggest.hidden = !where;
    start.textContent = "planning the known layouts …";
    start.setAttribute("aria-busy", "true");
    const done = await job({ ask: "start", topology: where }, (now) => {
      if (!now.result || where !== state.topology) return;
      begin = [...now.result, ...begin.filter((row) => row.name === "search result")];
      drawStart();
    });
    if (where !== state.topology) return;
    start.setAttribute("aria-busy", "false");
    if (done.failed) start.textContent = done.failed.headline;
  }
  let searching = null;
  async function search() {
    if (searching != null) { await ask({ ask: "stop", job: searching }); return; }
    suggest.textContent = "Stop";
    const done = await job({ ask: "suggest", topology: state.topology }, (now, number) => {
      searching = number;
      searched.textContent = now.running ? now.text : "";
    });
    searching = null;
    suggest.textContent = "Search for a better layout";
    if (done.failed) { searched.textContent = done.failed.headline; return; }
    begin = [...begin.filter((row) => row.name !== "search result"), ...done.result];
    drawStart();
    remember();
    const [best] = done.result;
    use({ mesh: best.mesh, rules: best.rules.map((rule) => ({ text: rule, on: true })) });
  }

  async function compileThis() {
    const { mesh, layout, topology: where } = shown;
    compiled.hidden = false;
    compile.disabled = true;
    const status = make("p", { class: "dim", role: "status" }, "lowering …");
    const about = make("p", {}, make("code", {}, `${mesh}: ${layout}`));
    compiled.replaceChildren(make("h2", {}, "Compiled program"), about, status);
    const done = await job({ ask: "compile", mesh, topology: where, layout }, (now) => { if (now.text) status.textContent = now.text; });
    compile.disabled = !shown;
    if (done.failed) {
      const error = make("div", { class: "error", role: "alert" });
      wrong(error, { ...done.failed, headline: `not compiled: ${done.failed.headline}` });
      status.replaceWith(error);
      return;
    }
    const { head, rows } = done.result;
    status.textContent = head;
    compiled.append(make("table", {}, make("thead", {}, make("tr", {}, make("th"), make("th", { class: "n" }, "estimate"), make("th", { class: "n" }, "compiler"))),
      make("tbody", {}, ...rows.map(([what, a, b]) => make("tr", {}, make("td", {}, what), make("td", { class: "n" }, a), make("td", { class: "n" }, b))))));
  }

  // -- pin and copy

  function togglePin() {
    state.pinned = state.pinned ? null : { mesh: shown.mesh, topology: shown.topology, layout: shown.layout };
    plan();
  }
  async function copy(line, from) {
    if (line == null) return;
    try {
      await navigator.clipboard.writeText(line);
      const label = from.textContent;
      from.textContent = "Copied";
      setTimeout(() => { from.textContent = label; }, 900);
    } catch { // the browser denies access to the clipboard: select the text for copying by hand
      const box = make("textarea", { class: "mono wide", readonly: true, rows: "4", "aria-label": "to copy" });
      box.value = line;
      statusLine.replaceChildren(box);
      box.select();
    }
  }

  (async () => {
    const opened = await ask({ ask: "open" }).catch((e) => ({ failed: `${e}` }));
    if (opened.failed) { say(opened.failed); return; }
    title.textContent = opened.title;
    dims = opened.dims;
    use({ topology: opened.topology, mesh: opened.mesh, rules: opened.rules.map((rule) => ({ text: rule, on: true })) });
    fillStart();
  })();
}

/** The page of a server: the token is in its address. */
export function served() {
  const token = new URLSearchParams(location.search).get("token");
  mount(document.querySelector("main"), async (request) => {
    const reply = await fetch("/ask", {
      method: "POST", body: JSON.stringify(request), headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` },
    }).catch(() => { throw new Error("the server does not answer: was it stopped?"); });
    if (!reply.ok) throw new Error(await reply.text());
    return reply.json();
  });
}

/** The page of a notebook. */
export default {
  render({ model, el }) {
    const waiting = new Map();
    let number = 0;
    const hear = (message) => { waiting.get(message.number)?.(message.reply); waiting.delete(message.number); };
    model.on("msg:custom", hear);
    el.classList.add("mp", "lab");
    mount(el, (request) => new Promise((done) => {
      waiting.set(number, done);
      model.send({ number, request });
      number += 1;
    }));
    return () => model.off("msg:custom", hear);
  },
};
