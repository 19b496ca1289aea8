// The page's frame: it shows the view that the address names, and asks the admin API for what a view needs. Text from
// outside becomes text nodes only; see el in views.js.
import {views, el} from "/web/views.js";

const main = document.getElementById("view");
const nav = document.getElementById("views");
const status = document.getElementById("status");
let stop = () => {};
let has = {}; // paths of the API that this kvepp serves

function say(text, lost) {
  status.textContent = text;
  status.classList.toggle("lost", !!lost);
}

// ask returns the JSON of a path. Without a valid session the browser goes to the login.
async function ask(path) {
  const response = await fetch(path, {headers: {Accept: "application/json"}});
  if (response.status === 401) {
    location.assign("/login");
    return new Promise(() => {});
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error || `${path} answers ${response.status}`);
  return body;
}

// pollInto asks a path again and again until stopped, but not while the page is hidden.
function pollInto(stops, path, seconds, show) {
  let timer = 0, ended = false;
  const round = async () => {
    if (!document.hidden) {
      try {
        const body = await ask(path);
        if (ended) return;
        show(body);
        say("updated " + new Date().toLocaleTimeString());
      } catch (error) {
        if (ended) return;
        say("no response from kvepp: " + error.message, true);
      }
    }
    if (!ended) timer = setTimeout(round, seconds * 1000);
  };
  stops.push(() => { ended = true; clearTimeout(timer); });
  round();
}

function open() {
  const [name, ...rest] = location.hash.replace(/^#\//, "").split("/");
  const view = views.find(v => v.name === name && shown(v)) || views[0];
  stop();
  const stops = [];
  stop = () => stops.forEach(f => f());
  main.replaceChildren();
  main.dataset.view = view.name;
  document.title = "kvepp: " + view.title;
  for (const link of nav.children) {
    if (link.dataset.view === view.name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  view.start(main, {
    ask, say, rest: rest.map(decodeURIComponent),
    poll: (path, seconds, show) => pollInto(stops, path, seconds, show),
    onStop: f => stops.push(f),
  });
}

const shown = view => !view.needs || has[view.needs];

async function begin() {
  try {
    has = (await ask("/debug/fleet")).paths || {};
  } catch (error) {
    say("no response from kvepp: " + error.message, true);
    setTimeout(begin, 3000);
    return;
  }
  nav.replaceChildren(...views.filter(shown).map(v => {
    const link = el("a", {href: "#/" + v.name}, v.title);
    link.dataset.view = v.name;
    return link;
  }));
  addEventListener("hashchange", () => { open(); main.focus(); });
  open();
}

begin();
