// The right edge of a table that is wider than its box fades, until it is scrolled to the end.
function fadeEdge(scroller) {
  const show = () => scroller.classList.toggle("more", scroller.scrollWidth - scroller.clientWidth - scroller.scrollLeft > 1);
  scroller.addEventListener("scroll", show);
  addEventListener("resize", show);
  show();
  return show;
}
