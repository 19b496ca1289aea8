package router

import (
	"cmp"
	"math"
	"slices"

	"kvepp/pool"
)

// fallbacks returns the addresses of the next cheapest endpoints of a leg, at most Config.Fallbacks, for a proxy that
// cannot reach the chosen one. Each fits the headers that the request gets. Ejected endpoints come last: one that may
// fail is better than none.
func (c *Config) fallbacks(g *gathered, l *leg, chosen int) (addresses []string, costs []float64) {
	if c.Fallbacks <= 0 {
		return nil, nil
	}
	order := make([]int, 0, len(l.workers))
	add := func(w *pool.Worker, cost float64) {
		if len(addresses) < c.Fallbacks && sameHeaders(w, &l.workers[chosen]) &&
			w.Address != l.workers[chosen].Address &&
			!slices.Contains(addresses, w.Address) {
			addresses, costs = append(addresses, w.Address), append(costs, cost)
		}
	}
	for i := range l.workers {
		if !math.IsNaN(l.costs[i]) && !math.IsInf(l.costs[i], 0) && !g.onTrial(l.workers[i].Worker) {
			order = append(order, i)
		}
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(l.costs[i], l.costs[j]) })
	for _, i := range order {
		add(&l.workers[i], l.costs[i])
	}
	for i := range l.workers {
		if g.onTrial(l.workers[i].Worker) {
			add(&l.workers[i], l.costs[i])
		}
	}
	if !g.ejectedAdmitted {
		for i := range g.ejected {
			if g.ejected[i].Role == l.workers[chosen].Role {
				add(&g.ejected[i], math.Inf(1))
			}
		}
	}
	return addresses, costs
}

// sameHeaders reports whether a request with the headers for one worker can be sent to the other unchanged.
func sameHeaders(a, b *pool.Worker) bool {
	return a.RankByAddress && b.RankByAddress || a.Rank == b.Rank && a.RankByAddress == b.RankByAddress
}
