// A table that is wider than the page gets a line above it that says so, and can be scrolled with
// the keyboard.
function markWideTables() {
  for (const table of document.querySelectorAll(".bd-article table")) {
    const isWide = table.scrollWidth > table.clientWidth + 1;
    const before = table.previousElementSibling;
    const hasHint = before !== null && before.classList.contains("scroll-hint");
    table.classList.toggle("scrolls", isWide);
    if (isWide && !hasHint) {
      const hint = document.createElement("p");
      hint.className = "scroll-hint";
      hint.textContent = "This table is wider than the screen: scroll it sideways →";
      table.before(hint);
      table.tabIndex = 0;
    }
    if (!isWide && hasHint) {
      before.remove();
      table.removeAttribute("tabindex");
    }
  }
}
addEventListener("DOMContentLoaded", markWideTables);
addEventListener("resize", markWideTables);
