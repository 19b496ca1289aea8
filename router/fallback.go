package router

import (
	"cmp"
	"math"
	"slices"
)

// fallbacks returns the addresses of the next cheapest endpoints of a leg after the one that was chosen, for a proxy that cannot
// reach that; at most Config.Fallbacks, nil if none are wanted. They are of the same rank, which headers name.
func (r *Router) fallbacks(l *leg, chosen int) (addresses []string) {
	if r.cfg.Fallbacks <= 0 {
		return nil
	}
	order := make([]int, 0, len(l.workers))
	for i := range l.workers {
		if l.workers[i].Rank == l.workers[chosen].Rank && !math.IsNaN(l.costs[i]) && !math.IsInf(l.costs[i], 0) {
			order = append(order, i)
		}
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(l.costs[i], l.costs[j]) })
	for _, i := range order {
		if len(addresses) == r.cfg.Fallbacks {
			break
		}
		if address := l.workers[i].Address; address != l.workers[chosen].Address && !slices.Contains(addresses, address) {
			addresses = append(addresses, address)
		}
	}
	return addresses
}
