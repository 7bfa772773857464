"use strict";
// Each cell of a wide table knows its column: on a phone, site.css shows such a table as a list.
for (const table of document.querySelectorAll("table:not([class])")) {
  const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
  if (heads.length > 2) {
    table.dataset.wide = "";
    table.querySelectorAll("tbody tr").forEach((row) => {
      [...row.cells].forEach((cell, i) => { cell.dataset.head = heads[i] || ""; });
    });
  }
}
