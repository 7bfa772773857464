"use strict";
// Updates the page when the server says that its run has changed; zoomed figures and open details stay as they are.
(function () {
  const texts = new Map(); // the JSON that each place shows
  const asked = new Map(); // the last request of each place
  const ready = new Promise((resolve) => { document.addEventListener("DOMContentLoaded", resolve); }); // Plotly, too

  async function load(place) {
    const request = {};
    asked.set(place, request);
    const answer = await fetch(`figure/${place.id}${location.search}`, {cache: "no-store"});
    const [text] = await Promise.all([answer.text(), ready]);
    if (answer.ok && asked.get(place) === request && texts.get(place) !== text) {
      texts.set(place, text);
      page.take(place, JSON.parse(text));
    }
  }

  // Figures are loaded when the reader comes near. The table of trials is loaded at once: a click on a point needs it.
  function follow(place) {
    return place.id === "trials" ? load(place) : page.whenNear(place, load);
  }

  const drawings = (section) => [...section.querySelectorAll("[data-drawing]")];
  const shape = (section) => drawings(section).map((each) => each.id).join();

  function takeWords(old, now) {
    const open = [...old.querySelectorAll("details")].map((each) => each.open);
    old.innerHTML = now.innerHTML;
    old.querySelectorAll("details").forEach((each, i) => { each.open = Boolean(open[i]); });
  }

  const titles = (of) => [...of.querySelectorAll("section h2")].map((head) => head.textContent).join("\n");

  function take(now) {
    if (titles(now) !== titles(document)) {
      if (titles(now) !== "") { // otherwise the run cannot be read at the moment
        location.reload(); // a section has come, such as that of a population with its first copy
      }
      return;
    }
    document.querySelector("header p").innerHTML = now.querySelector("header p").innerHTML;
    tellAge();
    for (const section of now.querySelectorAll("section")) {
      const old = document.getElementById(section.id);
      if (shape(old) !== shape(section)) {
        drawings(old).forEach(page.forget);
        old.replaceWith(document.importNode(section, true));
        continue;
      }
      const words = section.querySelectorAll(".words");
      old.querySelectorAll(".words").forEach((each, i) => takeWords(each, words[i]));
    }
    drawings(document).forEach(follow);
  }

  let busy = false;
  let again = false;
  async function fetchAgain() {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    try {
      const answer = await fetch(location.href, {cache: "no-store"});
      if (answer.ok) {
        take(new DOMParser().parseFromString(await answer.text(), "text/html"));
      }
    } finally {
      busy = false;
      if (again) {
        again = false;
        fetchAgain();
      }
    }
  }

  // The run's journal tells when it was last written, by the server's clock.
  let lost = false;
  function tellAge() {
    const place = document.getElementById("updated");
    if (place !== null) {
      const seconds = Math.max(0, Math.round(Date.now() / 1000 - place.dataset.at));
      const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([least]) => seconds >= least) || [1, "s"];
      place.textContent = `${lost ? "no connection, " : ""}updated ${Math.floor(seconds / size)} ${unit} ago`;
    }
  }

  drawings(document).forEach(follow);
  setInterval(tellAge, 1000);
  tellAge();
  const events = new EventSource(`events${location.search}`);
  events.onmessage = fetchAgain;
  events.onopen = () => { lost = false; };
  events.onerror = () => { lost = true; };
})();
