"use strict";
// Takes in the page again when the server says that its run has changed; what is zoomed or open stays so.
(function () {
  const hold = (held) => page.hold(document.getElementById(held.dataset.for), JSON.parse(held.textContent));
  const shape = (section) => [...section.querySelectorAll(".figure, .note, #trials")].map((each) => each.id || "note").join();

  function takeWords(old, now) {
    const open = [...old.querySelectorAll("details")].map((each) => each.open);
    old.innerHTML = now.innerHTML;
    old.querySelectorAll("details").forEach((each, i) => { each.open = Boolean(open[i]); });
  }

  function take(now) {
    document.querySelector("header p").innerHTML = now.querySelector("header p").innerHTML;
    tellAge();
    for (const section of now.querySelectorAll("section")) {
      let old = document.getElementById(section.id);
      if (shape(old) !== shape(section)) {
        old.querySelectorAll(".figure").forEach(page.forget);
        const fresh = document.importNode(section, true);
        old.replaceWith(fresh);
        fresh.querySelectorAll("script[data-for]").forEach(hold);
        continue;
      }
      const words = section.querySelectorAll(".words");
      old.querySelectorAll(".words").forEach((each, i) => takeWords(each, words[i]));
      section.querySelectorAll("script[data-for]").forEach((held) => {
        const before = old.querySelector(`script[data-for="${held.dataset.for}"]`);
        if (before.textContent !== held.textContent) {
          before.textContent = held.textContent;
          hold(before);
        }
      });
    }
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
      const answer = await fetch(location.pathname, {cache: "no-store"});
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

  document.querySelectorAll("script[data-for]").forEach(hold);
  setInterval(tellAge, 1000);
  tellAge();
  const events = new EventSource("events");
  events.onmessage = fetchAgain;
  events.onopen = () => { lost = false; };
  events.onerror = () => { lost = true; };
})();
