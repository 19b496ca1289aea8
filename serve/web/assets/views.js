// The views of the page. Each has start(root, page), where page.poll asks a path of the API until the view is left.

// el makes an element. Attributes are set as text, and children that are no nodes become text nodes: nothing that kvepp
// answers is ever read as markup.
export function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  fill(node, attributes, children);
  return node;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(node, attributes, children);
  return node;
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== undefined && value !== null) node.setAttribute(name, String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== undefined && child !== null) node.append(child);
  }
}

// outside marks text that a client, an engine or an operator chose, so that its direction does not change the rest.
const outside = text => el("bdi", {}, text ?? "");

const number = n => n === null || n === undefined ? "-" : Math.round(n).toLocaleString("en");
const short = n => {
  if (n === null || n === undefined) return "-";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (n >= size) return (n / (unit === "k" ? 1e3 : size)).toFixed(1) + " " + unit;
  }
  return number(n);
};
const percent = share => share === null || share === undefined || Number.isNaN(share) ? "-" : (100 * share).toFixed(1) + " %";
const share = (part, all) => all > 0 ? part / all : null;
const milliseconds = ms => ms ? (ms < 1000 ? ms.toFixed(ms < 10 ? 1 : 0) + " ms" : (ms / 1000).toFixed(2) + " s") : "-";
const duration = s => {
  if (s === null || s === undefined) return "-";
  if (s < 90) return s.toFixed(s < 10 ? 1 : 0) + " s";
  return s < 5400 ? (s / 60).toFixed(0) + " min" : (s / 3600).toFixed(1) + " h";
};
const keyOf = w => w.name + "/" + w.dp_rank;

function tiles(pairs) {
  return el("dl", {class: "tiles"}, pairs.map(([name, value, id]) =>
    el("div", {class: "tile"}, el("dt", {}, name), el("dd", {id}, value))));
}

function facts(pairs) {
  return el("dl", {class: "facts"}, pairs.filter(([, value]) => value !== undefined && value !== null && value !== "")
    .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function findings(texts) {
  if (!texts || !texts.length) return null;
  return el("ul", {class: "findings", "aria-label": "Findings"}, texts.map(text => el("li", {}, outside(text))));
}

// spark draws values as a line; null values leave a gap.
function spark(values, label) {
  const width = 110, height = 26, known = (values || []).filter(v => v !== null);
  const picture = svg("svg", {class: "spark", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label},
    svg("line", {x1: 0, x2: width, y1: height - 1, y2: height - 1}));
  if (known.length < 2) return picture;
  const most = Math.max(...known, 1e-9), slots = 60;
  let points = [];
  const flush = () => {
    if (points.length) picture.append(svg("polyline", {points: points.join(" ")}));
    points = [];
  };
  values.forEach((v, i) => {
    if (v === null) return flush();
    const x = width - (values.length - 1 - i) * width / (slots - 1), y = height - 2 - (height - 5) * v / most;
    points.push(x.toFixed(1) + "," + y.toFixed(1));
  });
  flush();
  return picture;
}

// table makes a table that sorts. Columns: {title, cell(row), key(row) to sort by, number}.
function table(columns, caption, order) {
  const body = el("tbody");
  const state = {column: order ? order.column : -1, down: order ? order.down : false, rows: []};
  const heads = columns.map((c, i) => {
    if (!c.key) return el("th", {scope: "col", class: c.number ? "number" : null}, c.title);
    const button = el("button", {type: "button"}, c.title);
    const head = el("th", {scope: "col", class: c.number ? "number" : null}, button);
    button.addEventListener("click", () => {
      state.down = state.column === i ? !state.down : !!c.number;
      state.column = i;
      if (order) { order.column = i; order.down = state.down; }
      draw();
    });
    return head;
  });
  function draw() {
    heads.forEach((h, i) => {
      if (i === state.column) h.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else h.removeAttribute("aria-sort");
    });
    const rows = [...state.rows];
    if (state.column >= 0) {
      const key = columns[state.column].key;
      rows.sort((a, b) => {
        const x = key(a) ?? -Infinity, y = key(b) ?? -Infinity;
        const way = typeof x === "string" ? x.localeCompare(y, "en", {numeric: true}) : x - y;
        return state.down ? -way : way;
      });
    }
    body.replaceChildren(...rows.map(row => el("tr", {}, columns.map(c =>
      el("td", {class: (c.number ? "number " : "") + (c.class || ""), "data-label": c.title}, c.cell(row))))));
  }
  const plain = columns.every(c => !c.key);
  const node = el("table", {}, caption ? el("caption", {}, caption) : null,
    el("thead", {class: plain ? "plain" : null}, el("tr", {}, heads)), body);
  return {node, show(rows) { state.rows = rows; draw(); }};
}

const fleetOrder = {column: 0, down: false};

function states(w) {
  return w.states.map(s => el("span", {class: "state " + s.level}, s.state, s.detail ? el("small", {}, outside(s.detail)) : null));
}

// shadowed compares kvepp's choices with those of the picker in service.
function shadowed(s) {
  if (!s) return null;
  const count = name => s.outcomes[name] || 0, choices = count("equal") + count("other");
  const reasons = Object.entries(s.outcomes).filter(([name, n]) => n && name !== "equal" && name !== "other");
  return el("section", {id: "shadow"}, el("h3", {}, "Shadow: another picker chooses"),
    tiles([["Choices as kvepp's", percent(share(count("equal"), choices)), "t-equal"], ["Compared", number(choices)],
      ["Cached, kvepp's choices", percent(share(s.tokens.kvepp, s.tokens.prompt)), "t-kvepp"],
      ["Cached, where served", percent(share(s.tokens.served, s.tokens.prompt)), "t-served"]]),
    facts(reasons.map(([name, n]) => ["Not compared: " + name, number(n)])));
}

const fleet = {
  name: "fleet", title: "Fleet",
  start(root, page) {
    const top = el("div");
    let before = null, past = {}, rates = {};
    const grid = table([
      {title: "Worker", cell: w => outside(keyOf(w)), key: keyOf},
      {title: "State", cell: states, key: w => w.states.map(s => s.state).join()},
      {title: "Blocks", number: true, key: w => w.blocks,
        cell: w => short(w.blocks) + (w.capacity_blocks ? " / " + short(w.capacity_blocks) : "")},
      {title: "Running", number: true, key: w => w.running ?? w.booked_requests, cell: w => number(w.running ?? w.booked_requests)},
      {title: "Waiting", number: true, key: w => w.waiting, cell: w => number(w.waiting)},
      {title: "Prefill tokens", number: true, key: w => w.prefill_tokens, cell: w => short(w.prefill_tokens)},
      {title: "Held blocks", number: true, key: w => w.active_blocks, cell: w => short(w.active_blocks)},
      {title: "Hit share", number: true, key: w => share(w.cached_tokens_total, w.prompt_tokens_total),
        cell: w => percent(share(w.cached_tokens_total, w.prompt_tokens_total))},
      {title: "Requests/s", number: true, key: w => rates[keyOf(w)], cell: w => rate(rates[keyOf(w)])},
      {title: "Last event", number: true, key: w => w.last_event_seconds, cell: w => duration(w.last_event_seconds)},
      {title: "Requests, 10 min", cell: w => spark(past[keyOf(w)]?.requests_per_second, "requests per second of ten minutes")},
      {title: "Hits, 10 min", cell: w => spark(past[keyOf(w)]?.hit_share, "hit share of ten minutes")},
    ], "Workers of this kvepp: one line for each data-parallel rank.", fleetOrder);
    root.append(el("h2", {}, "Fleet"), top, grid.node);
    const rate = r => r === undefined ? "-" : r.toFixed(1);
    let lines = [];
    page.poll("/debug/fleet?history=1", 10, f => {
      past = {};
      for (const w of f.workers) past[keyOf(w)] = w.history;
      grid.show(lines);
    });
    page.poll("/debug/fleet", 2, f => {
      const now = Date.parse(f.time) / 1000;
      let all = 0;
      if (before) {
        const seconds = now - before.time;
        for (const w of f.workers) {
          const then = before.requests[keyOf(w)];
          if (then !== undefined && seconds > 0) all += rates[keyOf(w)] = Math.max(w.requests_total - then, 0) / seconds;
        }
      }
      const known = before !== null;
      before = {time: now, requests: Object.fromEntries(f.workers.map(w => [keyOf(w), w.requests_total]))};
      const sum = of => f.workers.reduce((n, w) => n + of(w), 0);
      const bad = f.workers.filter(w => w.states.some(s => s.level === "bad")).length;
      lines = f.workers;
      grid.show(lines);
      top.replaceChildren(tiles([
        ["Workers", number(f.workers.length) + (bad ? `, ${bad} with trouble` : ""), "t-workers"],
        ["Requests", number(sum(w => w.requests_total)), "t-requests"],
        ["Requests/s", known ? all.toFixed(1) : "-", "t-rate"],
        ["Hit share", el("a", {href: "#/ladder"}, percent(share(sum(w => w.cached_tokens_total), sum(w => w.prompt_tokens_total)))), "t-hits"],
        ["Running", number(sum(w => w.booked_requests)), "t-running"],
        ["Queued", number(f.queues.reduce((n, q) => n + q.requests, 0)), "t-queued"],
        ["Index blocks", short(f.index.blocks), "t-blocks"],
        ["Up", duration(now - Date.parse(f.started) / 1000), "t-up"],
      ]), findings(f.findings) || "", shadowed(f.shadow) || "");
    });
  },
};

// bar draws a share of a whole.
function bar(part, label) {
  return svg("svg", {class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label},
    svg("rect", {class: "all", width: 100, height: 10}),
    svg("rect", {class: "part", width: Math.max(Math.min(100 * (part || 0), 100), 0), height: 10}));
}

function rungs(list) {
  const all = list[0].tokens;
  return list.map(r => [
    r.lost.length ? el("ul", {class: "losses"}, r.lost.map(l => el("li", {"data-cause": l.cause},
      el("span", {class: l.advice ? "cause" : "plain"}, "- " + l.cause), el("span", {}, percent(share(l.tokens, all))),
      el("span", {class: "dim"}, l.advice || "")))) : null,
    el("div", {class: "rung", "data-rung": r.rung}, el("span", {class: "name"}, r.rung), bar(share(r.tokens, all), r.rung),
      el("span", {class: "value"}, number(r.tokens) + " tokens, " + percent(share(r.tokens, all)))),
  ]);
}

const ladder = {
  name: "ladder", title: "Ladder", needs: "/debug/ladder",
  start(root, page) {
    const choice = el("select", {id: "model", "aria-label": "Model"});
    const body = el("div");
    let latest = null;
    root.append(el("h2", {}, "Why is the hit rate what it is?"),
      el("p", {class: "dim"}, "How many prompt tokens reach each rung on the way to a prefix cache, since kvepp started, " +
        "and why the others do not."),
      el("div", {class: "controls"}, el("label", {}, "Model ", choice)), body);
    const draw = () => {
      const sum = choice.value === "" ? latest.total : latest.models.find(m => m.model === choice.value) || latest.total;
      body.replaceChildren(...[findings(latest.total.findings), el("p", {}, number(sum.requests) + " requests"),
        ...rungs(sum.rungs).flat(Infinity),
        sum.unpredicted_tokens ? el("p", {}, number(sum.unpredicted_tokens) + " tokens were delivered, though the index did " +
          "not have them") : null,
        latest.sampling > 1 ? el("p", {class: "dim"}, `kvepp remembers one of ${latest.sampling} requested blocks: ` +
          "\"reusable\" is an estimate.") : null].filter(x => x));
    };
    choice.addEventListener("change", draw);
    page.poll("/debug/ladder", 3, l => {
      latest = l;
      const names = ["", ...l.models.map(m => m.model)];
      if (names.join("\n") !== [...choice.options].map(o => o.value).join("\n")) {
        const kept = choice.value;
        choice.replaceChildren(...names.map(n => el("option", {value: n}, n || "all models")));
        choice.value = names.includes(kept) ? kept : "";
      }
      draw();
    });
  },
};

// costBar draws the parts of a cost. What cached blocks save is the dashed end; the line is the cost itself.
function costBar(c, most) {
  const picture = svg("svg", {class: "cost", viewBox: "0 0 1000 18", preserveAspectRatio: "none", role: "img",
    "aria-label": (c.parts || []).map(p => p.part + " " + p.value.toFixed(2)).join(", ")});
  let at = 0, saved = 0;
  for (const p of c.parts || []) {
    if (p.value < 0) { saved -= p.value; continue; }
    const width = 1000 * p.value / most;
    picture.append(svg("rect", {class: "p-" + p.part, x: at.toFixed(1), y: 2, width: width.toFixed(1), height: 14},
      svg("title", {}, p.part + " " + p.value.toFixed(2))));
    at += width;
  }
  if (saved > 0) {
    const width = 1000 * saved / most;
    picture.append(svg("rect", {class: "saved", x: (at - width).toFixed(1), y: 1, width: width.toFixed(1), height: 16},
      svg("title", {}, "cached -" + saved.toFixed(2))));
    at -= width;
  }
  picture.append(svg("line", {class: "net", x1: at.toFixed(1), x2: at.toFixed(1), y1: 0, y2: 18}));
  return picture;
}

const positive = c => (c.parts || []).reduce((n, p) => n + Math.max(p.value, 0), 0);

export function candidates(list, weights, title) {
  if (!list.length) return null;
  const unit = weights && weights.policy === "time" ? "ms" : "blocks";
  const most = Math.max(...list.map(positive), 1e-9);
  const names = [...new Set(list.flatMap(c => (c.parts || []).map(p => p.part)))];
  const sorted = [...list].sort((a, b) => (b.chosen ? 1 : 0) - (a.chosen ? 1 : 0) || (a.cost ?? Infinity) - (b.cost ?? Infinity));
  return el("section", {class: "candidates"}, el("h3", {}, title),
    el("ul", {class: "legend"}, names.map(n => el("li", {}, el("i", {class: "p-" + n}),
      n === "cached" ? "cached (saves, dashed)" : n))),
    sorted.map(c => el("div", {class: "candidate" + (c.chosen ? " chosen" : ""), "data-worker": c.name + "/" + c.dp_rank},
      el("div", {class: "head"}, el("span", {class: "who"}, outside(c.name + "/" + c.dp_rank), c.chosen ? " - chosen" : ""),
        el("span", {class: "price"}, c.cost === null ? "not priced" : c.cost.toFixed(2) + " " + unit),
        el("span", {class: "dim"}, number((c.device_blocks + c.host_blocks + c.disk_blocks) * c.block_size) + " tokens cached, " +
          number(c.waiting_prefill_tokens) + " wait, " + number(c.active_requests) + " run")),
      costBar(c, most), c.lost ? el("div", {class: "dim why"}, c.lost) : null)));
}

function outcome(d) {
  const o = d.outcome;
  if (!o) return facts([["Outcome", d.error ? "refused" : "the request runs"]]);
  const cached = o.cached_tokens === null ? "not reported" : number(o.cached_tokens);
  return facts([
    ["Status", o.status || "no response"], ["Response", o.complete ? "complete" : "incomplete"],
    ["Time to first token", milliseconds(o.time_to_first_token_ms)], ["Between tokens", milliseconds(o.inter_token_ms)],
    ["Duration", milliseconds(o.duration_ms)], ["Output tokens", number(o.output_tokens || 0)],
    ["Cached, predicted", number(d.predicted_cached_tokens)], ["Cached, reported", cached],
    ["Prompt tokens, reported", o.prompt_tokens ? number(o.prompt_tokens) : "not reported"],
    ["Served by", d.served ? outside(d.served.worker || d.served.address) : "not reported"],
  ]);
}

// trace is the id of a decision's trace, as a link if --trace-url says where it is shown. kvepp
// checks its scheme at the start, and the page again.
function trace(d) {
  if (!d.trace_url || !/^https?:\/\//i.test(d.trace_url)) return d.trace_id;
  return el("a", {href: d.trace_url, target: "_blank", rel: "noopener noreferrer"}, d.trace_id);
}

function detail(d) {
  const names = list => outside((list || []).join(", "));
  return el("div", {class: "detail"},
    facts([
      ["Request", outside(d.request_id)], ["Model", outside(d.model || "-")], ["Adapter", d.lora ? outside(d.lora) : null],
      ["Path", outside(d.path)], ["Reason", d.reason], ["Session", d.session], ["Prompt tokens", number(d.prompt_tokens)],
      ["Trace", trace(d)],
      ["Waited", d.waited_seconds ? milliseconds(1000 * d.waited_seconds) : null],
      ["Ejected, left out", d.ejected ? names(d.ejected) : null], ["Cordoned, left out", d.cordoned ? names(d.cordoned) : null],
      ["Refused", d.error ? outside(d.error) : null],
    ]),
    el("h3", {}, "What happened"), outcome(d),
    d.prefill ? candidates(d.prefill.candidates, d.prefill.weights, "Candidates for the prompt") : null,
    candidates(d.candidates, d.weights, d.prefill ? "Candidates for the response" : "Candidates"),
    d.outcome && d.outcome.ladder ? el("section", {}, el("h3", {}, "Its ladder"), rungs(d.outcome.ladder)) : null);
}

const mostRows = 200;

const requests = {
  name: "requests", title: "Requests",
  start(root, page) {
    const body = el("tbody");
    const note = el("p", {class: "dim", role: "status"});
    const cold = el("input", {type: "checkbox", id: "cold"}), wrong = el("input", {type: "checkbox", id: "wrong-only"});
    const worker = el("input", {type: "search", id: "of-worker", placeholder: "NAME or NAME/RANK", size: 18});
    const pause = el("button", {type: "button"}, "Pause");
    let source = null, paused = false, left = 0, ended = false;
    const columns = ["Time", "Request", "Model", "Worker", "Reason", "Prompt", "Cached", "First token", "Duration", "Status"];
    root.append(el("h2", {}, "Requests"),
      el("div", {class: "controls"}, el("label", {}, cold, "nothing cached"), el("label", {}, wrong, "wrong prediction"),
        el("label", {}, "worker ", worker), pause), note,
      el("table", {class: "requests"}, el("caption", {}, "The latest decisions, as their requests end. Open one for its candidates."),
        el("thead", {class: "plain"}, el("tr", {}, columns.map(c => el("th", {scope: "col"}, c)))), body));
    const add = (d, first) => {
      const button = el("button", {type: "button", "aria-expanded": "false"}, outside(d.request_id || "(no id)"));
      const o = d.outcome;
      const cells = [new Date(d.time).toLocaleTimeString(), button, outside(d.model || "-"),
        outside(d.worker ? d.worker.name + "/" + d.worker.dp_rank : "-"), d.reason, number(d.prompt_tokens),
        (o && o.cached_tokens !== null ? number(o.cached_tokens) : "-") + " of " + number(d.predicted_cached_tokens),
        milliseconds(o && o.time_to_first_token_ms), milliseconds(o && o.duration_ms),
        o ? o.status || "none" : d.error ? "refused" : "running"];
      const row = el("tr", {"data-request": d.request_id}, cells.map((c, i) => el("td", {"data-label": columns[i]}, c)));
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-expanded") === "true";
        button.setAttribute("aria-expanded", String(!shown));
        if (shown) row.nextElementSibling.remove();
        else row.after(el("tr", {class: "opened"}, el("td", {colspan: columns.length, class: "wide"}, detail(d))));
      });
      if (first) body.prepend(row); else body.append(row);
      while (body.children.length > mostRows) body.lastElementChild.remove();
    };
    const query = () => {
      const q = new URLSearchParams();
      if (cold.checked) q.set("cold", "true");
      if (wrong.checked) q.set("wrong", "true");
      if (worker.value.trim()) q.set("worker", worker.value.trim());
      return q;
    };
    // The list is asked for once the stream is open, so that no decision falls between them. Those that the stream
    // brings meanwhile wait in early.
    const begin = () => {
      if (source) source.close();
      if (paused || ended) return;
      const q = query();
      q.set("follow", "1");
      q.set("rate", "20");
      let early = [];
      const mine = source = new EventSource("/debug/decisions?" + q);
      mine.onopen = () => {
        page.say("following");
        if (early) list(mine, early).finally(() => { early = null; });
      };
      mine.onerror = () => page.say("the stream of decisions is interrupted; the browser tries again", true);
      mine.onmessage = e => early ? early.push(JSON.parse(e.data)) : add(JSON.parse(e.data), true);
      mine.addEventListener("missed", e => {
        left += Number(e.data);
        note.textContent = number(left) + " requests are left out: the page shows at most 20 a second";
      });
    };
    const list = async (mine, early) => {
      try {
        const q = query();
        q.set("n", "50");
        const found = await page.ask("/debug/decisions?" + q);
        if (ended || mine !== source) return;
        body.replaceChildren();
        for (const d of found.decisions) add(d, false);
        const key = d => d.request_id + " " + d.time, known = new Set(found.decisions.map(key));
        for (const d of early) if (!known.has(key(d))) add(d, true);
      } catch (error) {
        page.say(error.message, true);
      }
    };
    for (const control of [cold, wrong, worker]) control.addEventListener("change", begin);
    pause.addEventListener("click", () => {
      paused = !paused;
      pause.textContent = paused ? "Go on" : "Pause";
      if (paused) { if (source) source.close(); page.say("paused"); } else begin();
    });
    page.onStop(() => { ended = true; if (source) source.close(); });
    begin();
  },
};

const queue = {
  name: "queue", title: "Queue",
  start(root, page) {
    const top = el("div");
    const grid = table([
      {title: "Model", cell: q => outside(q.model || "-"), key: q => q.model},
      {title: "Class", cell: q => outside(q.class), key: q => q.class},
      {title: "Requests", number: true, cell: q => number(q.requests), key: q => q.requests},
      {title: "Prompt tokens", number: true, cell: q => number(q.tokens), key: q => q.tokens},
      {title: "Of them cached", number: true, cell: q => number(q.cached_tokens), key: q => q.cached_tokens},
    ], "Requests that wait because every worker is busy, by policy class.");
    root.append(el("h2", {}, "Queue and classes"), top, grid.node);
    page.poll("/debug/fleet", 2, f => {
      top.replaceChildren(tiles([["Queued", number(f.queues.reduce((n, q) => n + q.requests, 0)), "t-queued"],
        ["Held by admission", number(f.held_requests), "t-held"]]));
      grid.show(f.queues);
    });
  },
};

const sessions = {
  name: "sessions", title: "Sessions",
  start(root, page) {
    const top = el("div");
    const grid = table([
      {title: "Worker", cell: w => outside(keyOf(w)), key: keyOf},
      {title: "Sessions", number: true, cell: w => number(w.sessions), key: w => w.sessions},
    ], "Sessions bound to each worker.");
    root.append(el("h2", {}, "Sessions"), top, grid.node);
    page.poll("/debug/fleet", 2, f => {
      const s = f.sessions;
      if (!s) {
        top.replaceChildren(el("p", {}, "Session affinity is off: --router-session-affinity-ttl-secs turns it on."));
      } else {
        top.replaceChildren(tiles([["Active", number(s.active), "t-active"], ["Requests: new", number(s.new), "t-new"],
          ["Requests: kept", number(s.kept), "t-kept"], ["Requests: moved", number(s.moved), "t-moved"],
          ["Ended by request", number(s.final)], ["Expired", number(s.expired)], ["Evicted", number(s.evicted)],
          ["Worker left", number(s.worker_left)], ["Lifetime", duration(s.ttl_seconds)]]));
      }
      grid.show(f.workers);
    });
  },
};

const configuration = {
  name: "configuration", title: "Configuration",
  start(root, page) {
    const text = el("input", {type: "search", id: "filter", placeholder: "name or value", "aria-label": "Filter"});
    const given = el("input", {type: "checkbox", id: "given"});
    const grid = table([
      {title: "Setting", cell: s => s.name, key: s => s.name},
      {title: "Value", cell: s => outside(s.value), key: s => s.value},
      {title: "From", cell: s => outside(s.source), key: s => s.source},
      {title: "Section", cell: s => s.section, key: s => s.section},
    ], "Effective settings. Secrets are shown by the name of their file.");
    const leave = el("form", {method: "post", action: "/logout"}, el("button", {}, "Log out"));
    root.append(el("h2", {}, "Configuration"), el("div", {class: "controls"}, el("label", {}, "Filter ", text),
      el("label", {}, given, "only what differs from the default")), grid.node);
    let all = [];
    const draw = () => grid.show(all.filter(s => (!given.checked || !s.default) &&
      (s.name + " " + s.value).toLowerCase().includes(text.value.trim().toLowerCase())));
    text.addEventListener("input", draw);
    given.addEventListener("change", draw);
    page.ask("/debug/config").then(c => {
      all = c.settings;
      draw();
      page.say("");
      if (all.some(s => s.name === "admin-token-file" && !s.default)) root.append(leave);
    }).catch(error => page.say(error.message, true));
  },
};

const replicas = {
  name: "replicas", title: "Replicas", needs: "/debug/replicas",
  start(root, page) {
    const top = el("div");
    const peers = table([
      {title: "Replica", cell: p => outside(p.name || p.replica), key: p => p.name || p.replica},
      {title: "State", cell: p => el("span", {class: "state " + (p.state === "live" ? "ok" : "bad")}, p.state), key: p => p.state},
      {title: "Address", cell: p => outside(p.address), key: p => p.address},
      {title: "Its running requests", number: true, cell: p => number(p.bookings), key: p => p.bookings},
      {title: "Staleness", number: true, cell: p => milliseconds(p.staleness_ms), key: p => p.staleness_ms},
      {title: "Heard", number: true, cell: p => duration(p.heard_ago_seconds) + " ago", key: p => p.heard_ago_seconds},
    ], "Replicas that this one reads: it counts their running requests as load.");
    root.append(el("h2", {}, "Replicas"), top);
    page.poll("/debug/replicas", 2, r => {
      if (!r.shares) {
        top.replaceChildren(el("p", {}, "This kvepp shares nothing with other replicas: --replica-peers or " +
          "--replica-service turns it on."));
        return;
      }
      if (!peers.node.isConnected) root.append(peers.node);
      top.replaceChildren(tiles([["Own running requests", number(r.self.bookings), "t-own"],
        ["Replicas read", number(r.peers.length), "t-peers"], ["Replicas that read this one", number(r.readers.length)],
        ["Their running requests", number(r.peers.reduce((n, p) => n + p.bookings, 0)), "t-copied"],
        ["Addresses", number((r.addresses || []).length), "t-addresses"]]),
        facts([["This replica", r.self.replica], ["Group", r.self.group ? outside(String(r.self.group)) : null]]));
      peers.show(r.peers);
    });
  },
};

// prefixes draws the radix tree of the kept decisions' prompts as a flame graph: a row for each level, as wide as its
// share of the requests.
const prefixes = {
  name: "prefixes", title: "Prefixes",
  start(root, page) {
    const top = el("div"), graph = el("div", {class: "flame"}), opened = el("div", {id: "prefix"});
    let chosen = null;
    const grid = table([
      {title: "Prefix", cell: p => pick(p, shortHash(p)), key: p => p.hash},
      {title: "Model", cell: p => outside(p.lora || p.model || "-"), key: p => p.lora || p.model},
      {title: "Blocks", number: true, cell: p => number(p.depth) + " + " + number(p.blocks), key: p => p.depth + p.blocks},
      {title: "Requests", number: true, cell: p => number(p.requests), key: p => p.requests},
      {title: "Blocks x requests", number: true, cell: p => number(p.heat), key: p => p.heat},
      {title: "Cached", number: true, cell: p => percent(share(p.cached_blocks, p.heat)), key: p => share(p.cached_blocks, p.heat)},
      {title: "Sessions", number: true, cell: p => number(p.sessions), key: p => p.sessions},
      {title: "Held by", cell: held, key: p => p.workers.length},
    ], "The hottest prefixes. Blocks: those before it in its prompts, and its own.", prefixOrder);
    root.append(el("h2", {}, "Prefixes"),
      el("p", {class: "dim"}, "What the kept decisions' prompts begin with. A bar is a prefix, as wide as its share of ",
        "the requests; the prefixes below it go on from it. The stronger its color, the more of it was cached by the chosen workers."),
      top, graph, opened, grid.node);
    const shortHash = p => p.hash.slice(0, 8);
    const show = p => {
      chosen = p.hash;
      for (const r of graph.querySelectorAll("[data-prefix]")) {
        r.classList.toggle("chosen", r.dataset.prefix === chosen);
      }
      opened.replaceChildren(el("div", {class: "detail"}, el("h3", {}, "Prefix " + p.hash),
        facts([["Model", p.model ? outside(p.model) : null], ["Adapter", p.lora ? outside(p.lora) : null],
          ["Blocks before it", number(p.depth)], ["Its blocks", number(p.blocks) + " of " + p.block_size + " tokens"],
          ["Requests", number(p.requests)], ["Blocks x requests", number(p.heat)],
          ["Of these cached", number(p.cached_blocks)], ["Sessions", number(p.sessions)], ["Session", p.session]]),
        p.workers.length ? p.workers.map(w => el("div", {class: "rung", "data-holder": keyOf(w)},
          el("span", {class: "name"}, outside(keyOf(w))), bar(share(w.blocks, p.blocks), keyOf(w) + " holds " + number(w.blocks) + " of " + number(p.blocks) + " blocks"),
          el("span", {class: "value"}, number(w.blocks) + " of " + number(p.blocks) + " blocks")))
          : el("p", {}, "No worker holds it now."),
        p.more_workers ? el("p", {}, number(p.more_workers) + " more workers hold some of it.") : null));
    };
    function pick(p, text) {
      const button = el("button", {type: "button", class: "hash"}, text);
      button.addEventListener("click", () => show(p));
      return button;
    }
    page.poll("/debug/prefixes", 5, found => {
      const all = [];
      const walk = list => list.forEach(p => { all.push(p); walk(p.children || []); });
      walk(found.roots);
      top.replaceChildren(tiles([["Requests", number(found.requests), "t-prefix-requests"],
        ["Prefixes", number(all.length), "t-prefixes"], ["Left out", number(found.cut_nodes), "t-cut"],
        ["Since", found.since ? new Date(found.since).toLocaleTimeString() : "-"]]));
      const focused = document.activeElement && document.activeElement.dataset.prefix;
      graph.replaceChildren(flame(found, show, chosen));
      const again = focused && graph.querySelector(`[data-prefix="${focused}"]`);
      if (again) again.focus();
      grid.show(all);
    });
  },
};

const prefixOrder = {column: 4, down: true};

const held = p => p.workers.length
  ? outside(p.workers.slice(0, 3).map(w => keyOf(w) + ": " + number(w.blocks)).join(", ") +
    (p.workers.length > 3 || p.more_workers ? ", ..." : ""))
  : el("span", {class: "dim"}, "no worker");

// flame draws the tree. Each bar is a button for the keyboard too.
function flame(found, show, chosen) {
  const row = 22, width = 1000, bars = [];
  let levels = 0;
  const place = (list, x, unit, level) => {
    for (const p of list) {
      const w = p.requests * unit;
      levels = Math.max(levels, level + 1);
      const cached = share(p.cached_blocks, p.heat) || 0;
      const rect = svg("rect", {x: x.toFixed(2), y: level * row, width: Math.max(w - 1.5, 0.5).toFixed(2), height: row - 2,
        class: "flame-bar" + (p.hash === chosen ? " chosen" : ""), "fill-opacity": (0.25 + 0.75 * cached).toFixed(3),
        tabindex: 0, role: "button", "data-prefix": p.hash,
        "aria-label": `prefix ${p.hash.slice(0, 8)}: ${p.blocks} blocks, ${p.requests} requests, ` +
          `${Math.round(100 * cached)} % cached`},
        svg("title", {}, `${p.hash.slice(0, 8)}: ${p.blocks} blocks x ${p.requests} requests`));
      rect.addEventListener("click", () => show(p));
      rect.addEventListener("keydown", e => {
        if (e.key === "Enter" || e.key === " ") { e.preventDefault(); show(p); }
      });
      bars.push(rect);
      place(p.children || [], x, unit, level + 1);
      x += w;
    }
  };
  const sum = found.roots.reduce((n, p) => n + p.requests, 0);
  if (!sum) return el("p", {}, "None of the latest decisions has known blocks.");
  place(found.roots, 0, width / sum, 0);
  return svg("svg", {viewBox: `0 0 ${width} ${levels * row}`, preserveAspectRatio: "none", height: Math.min(levels * row, 480),
    role: "group", "aria-label": "Flame graph of prefixes"}, bars);
}

export const views = [fleet, requests, prefixes, ladder, queue, sessions, replicas, configuration];
