"use strict";
// Unpacks Plotly and the figures of a report, which are gzip in base 85, and draws the figures.
(async function () {
  const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";

  function bytesOf(text) {
    const values = new Uint8Array(128);
    [...DIGITS].forEach((digit, i) => { values[digit.charCodeAt(0)] = i; });
    const bytes = new DataView(new ArrayBuffer(4 * Math.ceil(text.length / 5)));
    for (let i = 0, at = 0; i < text.length; i += 5, at += 4) {
      let value = 0;
      for (let j = i; j < i + 5; j += 1) {
        value = 85 * value + (j < text.length ? values[text.charCodeAt(j)] : 84);
      }
      bytes.setUint32(at, value);
    }
    return new Uint8Array(bytes.buffer, 0, Math.floor(4 * text.length / 5));
  }

  async function unpacked(id) {
    const bytes = bytesOf(document.getElementById(id).textContent);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  try {
    const [plotly, figures] = await Promise.all(["plotly", "figures"].map((name) => unpacked(`packed-${name}`)));
    const script = document.createElement("script");
    script.textContent = plotly; // the page's policy allows only this text
    document.head.append(script);
    script.remove();
    const [lists, text] = JSON.parse(figures); // a list that several figures share is stored once
    const drawn = JSON.parse(text, (_, value) => (value && value.$list !== undefined ? lists[value.$list] : value));
    for (const [name, figure] of Object.entries(drawn)) {
      const place = document.getElementById(name);
      if (name === "trials") {
        page.take(place, figure);
      } else {
        page.hold(place, figure); // printing also draws figures that never came near
        page.whenNear(place, () => page.take(place, figure));
      }
    }
  } catch (error) {
    document.documentElement.className = ""; // shows the hint for browsers that cannot draw
    throw error;
  }
})();
