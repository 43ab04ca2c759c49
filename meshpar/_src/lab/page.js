// The page of a lab. It draws the controls and requests everything else from a session: served() over HTTP, the default export over
// the connection of a notebook's kernel. make() and enhance() are in the script of plan pages, which precedes this one.

const MOST_PINNED = 4;
const AXES = ["data", "model", "context", "expert", "third", "fourth"];

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
  text.split("\n").flatMap((line, number) => {
    const off = line.trim().match(/^#\s*(.*:.*)$/);
    if (off) return [{ text: off[1], on: false, line: number }];
    return line.split("#")[0].split(";").map((rule) => rule.trim()).filter(Boolean).map((rule) => ({ text: rule, on: true, line: number }));
  });

/** The parts of a page's state that a link carries, as a URL fragment; and the inverse, which throws an Error for another text. */
const LINKED = ["target", "topology", "mesh", "lowering", "sizes", "names", "layout"];
const asLink = (state) => `#${new URLSearchParams(LINKED.filter((key) => state[key]).map((key) => [key, state[key]]))}`;
function fromLink(fragment, lowerings) {
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  for (const key of fields.keys()) if (!LINKED.includes(key)) throw new Error(`it has no field \`${key.slice(0, 40)}\`; the fields are ${LINKED.join(", ")}`);
  for (const key of ["mesh", "layout"]) if (!fields.has(key)) throw new Error(`its field \`${key}\` is absent`);
  const lowering = fields.get("lowering") ?? lowerings[0];
  if (!lowerings.includes(lowering)) throw new Error(`lowering \`${lowering.slice(0, 40)}\` does not exist: they are ${lowerings.join(", ")}`);
  const { topology = null, mesh, sizes = "", names = "", layout, target = null } = Object.fromEntries(fields);
  return { topology, mesh, sizes, names, lowering, rules: asRules(layout).map(({ text, on }) => ({ text, on })), target };
}

/** A rule with another name for a dim: "mlp?: model" → "ffn?: model". */
const withName = (rule, old, name) => { const at = rule.lastIndexOf(":"); return rule.slice(0, at).replace(new RegExp(`\\b${old}\\b`, "g"), name) + rule.slice(at); };

/** "batch=32, seq=4096" as [name, value] pairs; and the inverse. */
const sizePairs = (text) => text.split(",").map((part) => part.split("=").map((word) => word.trim())).filter(([name]) => name);
const sizeText = (pairs) => pairs.map(([name, n]) => `${name}=${n}`).join(", ");

/** Numbers for a logarithmic axis from `low` to `high`: evenly spaced round numbers, or, where the ends differ more, some numbers of each
 *  power of ten. */
function ticks(low, high) {
  const step = [1, 2, 5, 10].map((k) => k * 10 ** Math.floor(Math.log10((high - low) / 5))).find((size) => size >= (high - low) / 5);
  const first = Math.ceil(low / step);
  if (high < 3 * low) return [...Array(Math.floor(high / step) - first + 1).keys()].map((k) => (first + k) * step);
  const decades = [...Array(Math.floor(Math.log10(high)) - Math.floor(Math.log10(low)) + 1).keys()].map((k) => 10 ** (k + Math.floor(Math.log10(low))));
  const all = decades.flatMap((decade) => (high < 20 * low ? [1, 1.5, 2, 3, 5, 7] : high < 1000 * low ? [1, 2, 5] : [1]).map((k) => k * decade));
  return all.filter((value) => low <= value && value <= high);
}
const TIMES = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]], BYTES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
/** The ticks of an axis as [value, text], in the largest unit in which its end is at least one half. */
function axisTicks(low, high, units) {
  const [unit, size] = units.find(([, size_]) => high >= size_ / 2) ?? units.at(-1);
  return ticks(low / size, high / size).map((n) => [n * size, `${+n.toPrecision(4)} ${unit}`]);
}

/** Whether this browser has dismissed the hints. A cookie, since each lab has a port of its own, and other storage is kept by port. */
const HINTS = "meshpar_lab_hints=dismissed";
function dismissed() { try { return document.cookie.includes(HINTS); } catch { return false; } } // a frame without storage throws

/** Put the page into an element.
 *  @param ask request → promise of the reply
 *  @param linked whether the fragment of the page's address carries its state */
export function mount(root, ask, linked = false) {
  const state = { topology: null, mesh: "", rules: [], lowering: "", sizes: "", names: "", pinned: [] };
  const kept = {}; // the state of the controls in sections of the plan
  let opened = {}, sizes = [], colours = {}, dims = [], shown = null, past = [], asking = false, again = null, asText_ = false;

  // -- the frame

  const title = make("span", { class: "mono" });
  const statusLine = make("p", { class: "status", role: "status", "aria-live": "polite" });
  const start = make("div", { class: "start" });
  const suggest = make("button", { type: "button", class: "primary", click: () => search() }, "Search for a better layout");
  const searched = make("span", { class: "dim searched" });
  const progress = make("progress", { hidden: true, "aria-label": "time of the search", value: 0 });
  const plot = make("div", { class: "candidates" });
  const notice = make("div", { class: "error notice", role: "alert", hidden: true });
  const lowering = make("select", { "aria-label": "lowering", change: () => { remember(); state.lowering = lowering.value; plan(); fillStart(); } });
  const sizeFields = make("div", { class: "flow", hidden: true });
  const sizeError = make("div", { class: "error", role: "alert", hidden: true });
  const topology = make("input", {
    class: "mono", spellcheck: "false", "aria-label": "topology", placeholder: "v5e:16x16", size: "14",
    change: () => { remember(); state.topology = topology.value.trim() || null; plan({ fit: true }); fillStart(); },
  });
  const bar = make("div", { class: "mesh", role: "group", "aria-label": "factors of the mesh" });
  const meshInput = make("input", {
    class: "mono wide", spellcheck: "false", "aria-label": "mesh", input: () => { state.mesh = meshInput.value; plan(); },
    focus: () => remember(),
  });
  const nameRows = make("tbody"), nameError = make("div", { class: "error", role: "alert", hidden: true });
  const meshError = make("div", { class: "error", role: "alert", hidden: true });
  const list = make("ol", { class: "rules", "aria-label": "rules, in order" });
  const text = make("textarea", {
    class: "mono wide", spellcheck: "false", rows: "8", "aria-label": "layout as text", hidden: true,
    focus: () => remember(), input: () => { state.rules = asRules(text.value); plan(); },
  });
  const layoutError = make("div", { class: "error", role: "alert", hidden: true });
  const more = make("div", { class: "more-dims" });
  const button = (label, click, about) => make("button", { type: "button", click, title: about }, label);
  const copyLink = linked ? button("Copy link", () => copy(location.href, copyLink), "the address of this page, with mesh, layout, lowering and sizes") : null;
  const undo = button("Undo", () => back(), "restore the previous layout and mesh");
  const textButton = make("button", { type: "button", "aria-pressed": "false", click: () => toggleText() }, "As text");
  const pin = button("Pin", () => addPin(), "keep this plan, and compare later plans with it");
  const hints = [];
  const hint = (text_) => {
    const dismiss = () => {
      for (const one of hints) one.hidden = true;
      try { document.cookie = `${HINTS}; max-age=31536000; path=/; samesite=strict`; } catch { /* they are shown again next time */ }
    };
    hints.push(make("p", { class: "hint", role: "note", hidden: dismissed() }, text_, " ", button("Got it", dismiss, "hide the hints, in later labs too")));
    return hints.at(-1);
  };
  const copyLayout = button("Copy layout", () => copy(shown?.layout, copyLayout), "the layout as one line");
  const copyPython = button("Copy Python", () => copy(shown?.python, copyPython), "the mesh, the layout and the call of mp.jit");
  const compile = button("Compile this", () => compileThis(), "run the real compiler, which takes seconds to minutes");
  const copyNames = button("Copy names", () => copy(shown?.dims, copyNames), "tree-path patterns and dims, for dims=");
  const nameSection = make("details", { class: "names", hidden: true }, make("summary", {}, "Names of dims, inferred from their uses"),
    make("p", { class: "dim" }, "Nobody named a dim, so the program's uses did. A wrong name costs time, never a result. Click one to change it."),
    make("table", {}, make("thead", {}, make("tr", {}, ...["dim", "size", "arrays", "certain", "evidence"].map((head) =>
      make("th", { scope: "col", class: head === "arrays" ? "n" : "" }, head)))), nameRows), nameError, make("p", { class: "flow" }, copyNames));
  const cards = make("div", { class: "metrics", "aria-label": "metrics of the plan" });
  const facts = make("section", { "aria-label": "mesh, lowering, chip and JAX version" });
  const compiled = make("section", { hidden: true });
  const part = (heading, about) => {
    const body = make("div");
    const section = make("section", {}, make("h2", {}, heading), about ? make("p", { class: "dim" }, about) : null, body);
    return { body, section };
  };
  const panels = make("div", { class: "panels" }), parts = new Map(); // the sections of the plan, and each by its title
  const pins = part("Compared with pinned plans");
  pins.section.hidden = true;
  pins.section.className = "pins";
  root.replaceChildren(
    make("header", {}, make("h1", {}, "meshpar lab ", title),
      make("p", { class: "dim" }, "Edit the mesh and the rules: the numbers update at once. They are the plan's estimates; nothing is compiled " +
        "or run until you ask for it."), notice),
    make("div", { class: "bench" },
      make("div", { class: "controls" },
        make("section", {}, make("h2", {}, "Start from"), start, plot, make("p", { class: "flow" }, suggest, progress, searched),
          hint("Search plans some hundred meshes and layouts and shows the fastest that fits. Each is a point of the plot.")),
        make("section", {}, make("h2", {}, "Mesh"), make("p", { class: "flow" }, make("label", { class: "flow dim" }, "of ", topology),
          make("label", { class: "flow dim" }, "lowering ", lowering)), bar, meshInput, meshError, sizeFields, sizeError),
        make("section", {}, make("h2", {}, "Layout"),
          make("p", { class: "dim" }, "In order: an axis goes to the first rule whose dim is present."),
          list, text, layoutError, more,
          make("p", { class: "flow" }, ...[undo, textButton, copyLayout, copyPython, copyLink, compile].filter(Boolean)), statusLine, nameSection)),
      make("div", { class: "results" }, cards,
        make("div", { class: "pin" }, pin, hint("Pin this plan, then change a rule or load another layout: the page says why the new plan is faster or slower.")),
        pins.section, facts, compiled, panels)),
  );

  // -- state

  const draft = () => ({ topology: state.topology, mesh: state.mesh, rules: state.rules, lowering: state.lowering, sizes: state.sizes, names: state.names });
  const snapshot = () => JSON.stringify(draft());
  // a link in the page opens its group of collectives; the fragment of the address carries the state
  root.addEventListener("click", (e) => {
    const to = e.target.closest("a[href^='#']");
    if (to) { e.preventDefault(); openTarget(root, to.getAttribute("href")); }
  });
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
    const other = ["topology", "lowering", "sizes", "names"].some((key) => key in draft && draft[key] !== state[key]);
    Object.assign(state, draft);
    topology.value = state.topology ?? "";
    lowering.value = state.lowering;
    drawSizes();
    drawNames();
    drawRules();
    plan();
    if (other) fillStart();
  }
  /** The state in the fragment of the address; {}, with a message if there is a fragment, if it cannot be read. */
  function linkedState() {
    wrong(notice, null);
    if (!linked || location.hash.length < 2) return {};
    try {
      const { target, ...draft } = fromLink(location.hash, opened.lowerings);
      if (target && target !== opened.title) wrong(notice, { headline: `the link is of the target \`${target}\`; this lab has \`${opened.title}\`` });
      return draft;
    } catch (e) {
      wrong(notice, { headline: `the link cannot be read: ${e.message}`, fixes: ["the page shows the layout that the lab began with"] });
      return {};
    }
  }
  /** A field for each size of the target. */
  function drawSizes() {
    const own = { ...opened.sizes, ...Object.fromEntries(sizePairs(state.sizes)) };
    sizeFields.hidden = !Object.keys(own).length;
    sizeFields.replaceChildren(...Object.entries(own).map(([name, n]) => {
      const input = make("input", {
        class: "mono", value: n, size: 6, inputmode: "numeric", spellcheck: "false", "data-size": name,
        change: () => {
          remember();
          const all = [...sizeFields.querySelectorAll("input")].map((field) => [field.dataset.size, field.value.trim()]);
          state.sizes = sizeText(all.filter(([key, value]) => `${opened.sizes[key]}` !== value));
          plan();
          fillStart();
        },
      });
      return make("label", { class: "dim" }, `${name} `, input);
    }));
  }

  /** The inferred names: a click on one makes it a field, whose text is the new name. */
  function drawNames() {
    const own = Object.fromEntries(sizePairs(state.names));
    nameSection.hidden = !opened.names.length;
    nameRows.replaceChildren(...opened.names.map(([inferred, size, arrays, certain, evidence]) => {
      const now = own[inferred] ?? inferred;
      const cell = make("td"), name = make("button", { type: "button", class: "link mono", "aria-label": `rename ${now}`, click: () => edit() }, now);
      const edit = () => {
        const field = make("input", {
          class: "mono", value: now, size: 10, spellcheck: "false", "aria-label": `name of ${inferred}`,
          keydown: (e) => { if (e.key === "Enter") field.blur(); if (e.key === "Escape") { field.value = now; field.blur(); } },
          blur: () => rename(inferred, now, field.value.trim()),
        });
        cell.replaceChildren(field);
        field.select();
      };
      cell.append(name);
      return make("tr", {}, cell, make("td", {}, size), make("td", { class: "n" }, arrays), make("td", {}, certain), make("td", { class: "dim" }, evidence));
    }));
    const called = (dim) => own[dim] ?? dim;
    dims = opened.dims.map(([dim, lengths]) => [called(dim), lengths]);
  }
  function rename(inferred, now, name) {
    if (name && name !== now) {
      remember();
      const all = { ...Object.fromEntries(sizePairs(state.names)), [inferred]: name };
      state.names = sizeText(Object.entries(all).filter(([old, new_]) => old !== new_));
      for (const rule of state.rules) rule.text = withName(rule.text, now, name);
      drawRules();
      plan();
      fillStart();
    }
    drawNames();
  }

  // -- the plan: one request at a time, then one for the newest draft

  async function plan(options = {}) {
    if (asking) { again = { ...again, ...options }; return; }
    asking = true;
    root.setAttribute("aria-busy", "true");
    if (linked) history.replaceState(null, "", asLink({ ...state, target: opened.title, layout: asText(state.rules) }));
    const reply = await ask({ ask: "plan", ...draft(), pinned: state.pinned, ...options }).catch((e) => ({ failed: `${e}` }));
    asking = false;
    if (again) { const next = again; again = null; if (!options.fit || next.fit) return plan(next); }
    show(reply, options);
  }

  function show(reply, options) {
    root.setAttribute("aria-busy", "false");
    if (reply.failed) { say(reply.failed); root.classList.add("stale"); return; }
    if (options.fit && reply.mesh) state.mesh = reply.mesh;
    if (document.activeElement !== meshInput) meshInput.value = state.mesh;
    if (reply.sizes) {
      sizes = reply.sizes;
      colours = reply.colours;
      if (drag == null) drawMesh(); // a seam that is being dragged stays
    }
    wrong(meshError, reply.errors.mesh);
    wrong(sizeError, reply.errors.sizes);
    wrong(nameError, reply.errors.names);
    wrong(layoutError, reply.errors.layout, ...(asText_ ? linesWithErrors(reply.errors.rules) : []));
    text.setAttribute("aria-invalid", `${!layoutError.hidden}`);
    [...list.children].forEach((row, k) => row.update?.(reply, k));
    offerDims();
    shown = reply.plan ? { ...reply.plan, mesh: reply.mesh, topology: state.topology, lowering: state.lowering, sizes: state.sizes, names: state.names } : null;
    root.classList.toggle("stale", !shown);
    for (const b of [pin, copyLayout, copyPython, compile]) b.disabled = !shown;
    if (!shown) { say("the numbers belong to the last layout that could be planned"); return; }
    cards.innerHTML = shown.html.cards;
    facts.innerHTML = shown.html.facts;
    panels.replaceChildren(...shown.html.sections.map(([title, html, about]) => {
      if (!parts.has(title)) parts.set(title, part(title, about));
      const { body, section } = parts.get(title);
      body.innerHTML = html;
      return section;
    }));
    enhance(panels, kept);
    drawPins();
    pin.disabled = state.pinned.length >= MOST_PINNED || state.pinned.some(isShown);
    root.dataset.metrics = JSON.stringify(shown.metrics);
    root.dataset.milliseconds = reply.ms;
    markStart();
    say("");
  }

  function wrong(place, ...errors) {
    errors = errors.filter(Boolean);
    place.hidden = !errors.length;
    place.replaceChildren();
    for (const error of errors) {
      if (error.line) place.append(error.line, " ");
      place.append(make("b", {}, ...words(error.headline)));
      for (const [what, fact] of Object.entries(error.facts ?? {})) place.append(make("div", { class: "mono" }, `${what} ${fact}`));
      if (error.fixes?.length) place.append(make("ul", {}, ...error.fixes.map((fix) => make("li", {}, ...words(fix)))));
    }
  }
  /** The errors of rules, each with a button that selects its line of the text. */
  function linesWithErrors(errors) {
    const rules = asRules(text.value);
    return errors.map((error, k) => error && {
      ...error, line: make("button", { type: "button", click: () => select(rules[k]?.line ?? k) }, `line ${(rules[k]?.line ?? k) + 1}`),
    });
  }
  function select(line) {
    const lines = text.value.split("\n"), from = lines.slice(0, line).join("\n").length + (line > 0);
    text.focus();
    text.setSelectionRange(from, from + lines[line].length);
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

  let begin = [], candidates = []; // rows of the table; other candidates of the search, only in the plot
  function load(row) {
    remember();
    use({ mesh: row.mesh, rules: asRules(row.layout) });
  }
  const isCurrent = ({ mesh, layout }) =>
    state.mesh === mesh && asText(state.rules.filter((r) => r.on)).replaceAll("\n", "; ") === layout.replaceAll("\n", "; ");

  /** A link to a row: a click loads it, and with a key that opens a tab the browser opens it. */
  const opens = (row) => ({
    href: linked ? asLink({ ...state, mesh: row.mesh, layout: row.layout, target: opened.title }) : null,
    click: (e) => { e.stopPropagation(); if (!(e.ctrlKey || e.metaKey || e.shiftKey)) { e.preventDefault(); load(row); } },
  });

  /** Step time against peak memory of the known layouts and the candidates, each a link to its plan: a click, or Enter, loads it. */
  function drawPlot() {
    const timed = [...candidates, ...begin].filter((row) => row.seconds);
    const rows = timed.filter((row) => row.seconds <= 8 * Math.min(...timed.map((r) => r.seconds))).sort((a, b) => a.seconds - b.seconds || a.peak - b.peak);
    plot.replaceChildren();
    if (rows.length < 3) return;
    const [w, h, left, bottom, top] = [440, 206, 62, 34, 22];
    const [capacity, capacityText] = rows[0].capacity ?? [Infinity, ""];
    const near = capacity <= 8 * Math.max(...rows.map((row) => row.peak)); // else the points would be at the bottom of the plot
    const axis = (key, from, to, units, ...more) => {
      const [low, high] = [Math.min, Math.max].map((of) => Math.log(of(...rows.map((row) => row[key]), ...more)));
      const pad = Math.max(0.06 * (high - low), 0.03);
      const at = (value) => from + ((Math.log(value) - low + pad) / (high - low + 2 * pad)) * (to - from);
      return [at, axisTicks(Math.exp(low - pad), Math.exp(high + pad), units)];
    };
    const [x, times] = axis("seconds", left, w - 10, TIMES), [y, sizes_] = axis("peak", h - bottom, top, BYTES, ...(near ? [capacity] : []));
    const line = (d, stroke, more) => make("path", { d, fill: "none", stroke, ...more });
    const label = (at, y_, string, anchor, fill = "var(--dim)") => make("text", { x: at, y: y_, "font-size": 11, fill, "text-anchor": anchor }, string);
    const points = rows.map((row, k) => {
      const what = [row.name || "candidate", row.texts.join(", "), `${row.mesh}: ${row.layout || "(nothing sharded)"}`, row.fits === false ? "above the usable memory" : ""];
      const kind = `${row.fits === false ? "misfit" : row.name === "search result" ? "best" : row.name ? "known" : ""} ${isCurrent(row) ? "now" : ""}`;
      return make("svg:a", {
        role: "radio", tabindex: k ? -1 : 0, "aria-checked": `${isCurrent(row)}`, "aria-label": what.filter(Boolean).join("; "), ...opens(row),
        keydown: (e) => {
          if (e.key === "Enter" || e.key === " ") { e.preventDefault(); load(row); return; }
          const next = points[{ ArrowRight: k + 1, ArrowDown: k + 1, ArrowLeft: k - 1, ArrowUp: k - 1, Home: 0, End: points.length - 1 }[e.key]];
          if (!next) return;
          e.preventDefault();
          points[k].setAttribute("tabindex", -1);
          next.setAttribute("tabindex", 0);
          next.focus();
        },
      }, make("circle", { cx: x(row.seconds), cy: y(row.peak), r: row.name ? 5.5 : 4.5, class: kind }), make("title", {}, what.filter(Boolean).join("\n")));
    });
    const had = plot.dataset.focused;
    const painted = (point) => ["", "misfit", "known", "best", "now"].findLastIndex((kind) => !kind || point.firstChild.classList.contains(kind)); // the last on top
    const kinds = new Set(points.flatMap((point) => { const of = [...point.firstChild.classList]; return of.length ? of : [""]; }));
    plot.append(make("svg", { viewBox: `0 0 ${w} ${h}`, role: "radiogroup", "aria-label": "candidates: step time against peak memory" },
      ...times.map(([value]) => line(`M${x(value)} ${top}V${h - bottom}`, "var(--line)")), ...sizes_.map(([value]) => line(`M${left} ${y(value)}H${w - 6}`, "var(--line)")),
      line(`M${left} ${top - 6}V${h - bottom}H${w - 6}`, "var(--none)"),
      ...times.map(([value, text_]) => label(x(value), h - bottom + 14, text_, "middle")), ...sizes_.map(([value, text_]) => label(left - 5, y(value) + 4, text_, "end")),
      label(w - 6, h - 3, "step time", "end"), label(left - 5, 10, "peak memory", "middle"),
      ...(near ? [line(`M${left} ${y(capacity)}H${w - 6}`, "var(--bad)", { "stroke-dasharray": "5 3" }),
        label(w - 6, y(capacity) - 4, `usable ${capacityText}`, "end", "var(--bad)")] : []), ...[...points].sort((a, b) => painted(a) - painted(b))),
    make("div", { class: "key" }, ...[["known", "known layout"], ["best", "search result"], ["", "candidate"], ["misfit", "above the usable memory"], ["now", "shown"]]
      .filter(([kind]) => kinds.has(kind)).map(([kind, name]) => make("span", {}, make("i", { class: kind }), name)),
    capacityText && !near ? make("span", {}, `usable ${capacityText}`) : null));
    if (had) points.find((point) => point.getAttribute("aria-checked") === "true")?.focus();
  }
  /** Rows that fit first, then by step time and by peak. */
  function ranked(rows) {
    const rank = (row) => [row.fits === false, row.seconds ?? 0, row.peak];
    return [...rows].sort((x, y) => { const [a, b] = [rank(x), rank(y)]; const k = a.findIndex((v, i) => v !== b[i]); return k < 0 ? 0 : a[k] - b[k]; });
  }
  function drawStart() {
    const rows = ranked(begin);
    start.replaceChildren(make("table", {}, make("thead", {}, make("tr", {},
      make("th", { scope: "col" }, "layout, mesh"), make("th", { scope: "col", class: "n" }, "step"), make("th", { scope: "col", class: "n" }, "peak"))),
    make("tbody", {}, ...rows.map((row) => {
      const line = make("tr", {}, make("td", {}, make("button", { type: "button", class: "link", title: row.layout, click: () => load(row) }, row.name), make("span", { class: "dim" }, ` ${row.mesh.replaceAll("=", " ").replaceAll(", ", " × ")}`)),
      make("td", { class: "n" }, row.texts[0]), make("td", { class: `n ${row.fits === false ? "up" : ""}`, title: row.fits === false ? "above the usable memory" : "" }, row.texts[1]));
      line.row = row;
      return line;
    }))));
    markStart();
  }
  function markStart() {
    for (const line of start.querySelectorAll("tbody tr")) {
      const same = isCurrent(line.row);
      line.classList.toggle("now", same);
      if (same) line.setAttribute("aria-current", "true"); else line.removeAttribute("aria-current");
    }
    plot.dataset.focused = plot.contains(document.activeElement) ? "true" : "";
    drawPlot();
  }
  async function fillStart() {
    const where = state.topology, key = () => [state.topology, state.lowering, state.sizes, state.names].join("|"), of = key();
    const current = () => of === key();
    begin = [];
    candidates = [];
    drawPlot();
    suggest.hidden = !where;
    start.textContent = "planning the known layouts …";
    start.setAttribute("aria-busy", "true");
    const done = await job({ ask: "start", topology: where, lowering: state.lowering, sizes: state.sizes, names: state.names }, (now, number) => {
      if (!current()) { ask({ ask: "stop", job: number }); return; }
      if (!now.result) return;
      begin = [...now.result, ...begin.filter((row) => row.name === "search result")];
      drawStart();
      markStart();
    });
    if (!current()) return;
    start.setAttribute("aria-busy", "false");
    if (opened.chooses && !past.length && begin.length) { load(ranked(begin)[0]); opened.chooses = false; }
    if (done.failed) start.textContent = done.failed.headline;
  }
  let searching = null;
  async function search() {
    if (searching != null) { await ask({ ask: "stop", job: searching }); return; }
    suggest.textContent = "Stop";
    progress.hidden = false;
    progress.max = opened.seconds;
    progress.value = 0;
    searched.textContent = "starting …";
    const done = await job({ ask: "suggest", topology: state.topology, lowering: state.lowering, sizes: state.sizes, names: state.names }, (now, number) => {
      searching = number;
      progress.value = now.seconds;
      searched.textContent = now.running ? `${Math.round(now.seconds)} of ${opened.seconds} s; best so far ${now.text || "none"}` : "";
      searched.title = now.text;
    });
    searching = null;
    progress.hidden = true;
    suggest.textContent = "Search for a better layout";
    if (done.failed) { searched.textContent = done.failed.headline; return; }
    const [best, ...others] = done.result;
    begin = [...begin.filter((row) => row.name !== "search result"), best];
    candidates = others.filter((row) => !begin.some((known) => known.mesh === row.mesh && known.layout === row.layout));
    searched.textContent = `${done.result.length} candidates: choose one in the plot`;
    drawStart();
    load(best);
  }

  async function compileThis() {
    const { mesh, layout, topology: where, lowering: how, sizes: of, names } = shown;
    compiled.hidden = false;
    compile.disabled = true;
    const status = make("p", { class: "dim", role: "status" }, "lowering …");
    const about = make("p", {}, make("code", {}, `${mesh}: ${layout}`));
    compiled.replaceChildren(make("h2", {}, "Compiled program"), about, status);
    const done = await job({ ask: "compile", mesh, topology: where, layout, lowering: how, sizes: of, names }, (now) => { if (now.text) status.textContent = now.text; });
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

  const isShown = (pinned) => ["mesh", "topology", "layout", "lowering", "sizes", "names"].every((key) => pinned[key] === shown?.[key]);
  function addPin() {
    const { mesh, topology: where, layout, lowering: how, sizes: of, names } = shown;
    state.pinned.push({ mesh, topology: where, layout, lowering: how, sizes: of, names });
    plan().then(() => pins.section.scrollIntoView({ block: "nearest" }));
  }
  /** The pinned plans, each with its numbers and why this plan is slower or faster. */
  function drawPins() {
    const were = new Map([...pins.body.querySelectorAll("details")].map((details) => [details.dataset.of, details.open]));
    pins.section.hidden = !state.pinned.length;
    pins.body.replaceChildren(...state.pinned.map((pinned, k) => {
      const { texts, why, question, html } = shown.pinned[k];
      const folded = (title, body) => {
        const of = `${k} ${title === question ? "why" : "all"}`;
        const details = make("details", { "data-of": of, open: were.get(of) ?? title === question }, make("summary", {}, title), make("div"));
        details.lastChild.innerHTML = body;
        details.addEventListener("toggle", () => enhance(details), { once: true });
        return details;
      };
      const load = () => { remember(); use({ ...pinned, rules: asRules(pinned.layout.replaceAll("; ", "\n")) }); };
      return make("div", { class: "card" }, make("div", { class: "flow" }, make("strong", {}, texts[0]), make("span", {}, texts[1]),
        make("code", {}, [pinned.mesh, pinned.layout || "(nothing sharded)", pinned.sizes].filter(Boolean).join(": ")),
        button("Show", load, "restore this plan"), button("Unpin", () => { state.pinned.splice(k, 1); plan(); }, "forget this plan")),
      ...(isShown(pinned) ? [make("p", { class: "dim" }, "This is the plan that the page shows.")] :
        [why ? folded(question, why) : make("p", { class: "dim" }, "Both steps take equally long."), folded("Compare in full: a is the pinned plan, b this one", html)]));
    }));
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
    opened = await ask({ ask: "open" }).catch((e) => ({ failed: `${e}` }));
    if (opened.failed) { say(opened.failed); return; }
    title.textContent = opened.title;
    dims = opened.dims;
    lowering.replaceChildren(...opened.lowerings.map((name) => make("option", { value: name }, name)));
    const start = { topology: opened.topology, mesh: opened.mesh, lowering: opened.lowering, sizes: "", rules: asRules(opened.layout) };
    const fromAddress = linkedState();
    opened.chooses &&= !fromAddress.layout && !fromAddress.rules;
    use({ ...start, ...fromAddress });
    if (linked) addEventListener("hashchange", () => { remember(); use(linkedState()); });
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
  }, true);
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
