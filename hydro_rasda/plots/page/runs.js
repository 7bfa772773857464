"use strict";
// Updates the list when the server says that a run has changed; ticked runs stay ticked.
(function () {
  const place = document.getElementById("runs");
  const boxes = () => [...place.querySelectorAll("[name=run]")];

  function tell() {
    const button = place.querySelector(".tools button");
    if (button !== null) {
      button.disabled = boxes().filter((box) => box.checked).length < 2;
    }
  }

  place.addEventListener("change", tell);
  new EventSource("events").onmessage = async () => {
    const now = new DOMParser().parseFromString(await (await fetch(".", {cache: "no-store"})).text(), "text/html");
    const ticked = boxes().filter((box) => box.checked).map((box) => box.value);
    place.innerHTML = now.getElementById("runs").innerHTML;
    boxes().forEach((box) => { box.checked = ticked.includes(box.value); });
    tell();
  };
  tell();
})();
