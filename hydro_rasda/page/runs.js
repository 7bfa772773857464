"use strict";
new EventSource("events").onmessage = async () => {
  const now = new DOMParser().parseFromString(await (await fetch(".", {cache: "no-store"})).text(), "text/html");
  document.getElementById("runs").innerHTML = now.getElementById("runs").innerHTML;
};
