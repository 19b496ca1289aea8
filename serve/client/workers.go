package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"kvepp/router/eject"
	"kvepp/serve/admin"
)

const workersHelp = `Take an endpoint out of routing for maintenance, and bring it back. These commands talk to a
running kvepp serve at its --admin-address.

Usage:       kvepp workers          list the endpoints, whether they get requests, and how many run
             kvepp cordon NAME      send NAME no new requests; sessions move to other endpoints
             kvepp drain NAME       cordon NAME, then wait until no request runs on it
             kvepp uncordon NAME    send NAME requests again
Example:     kvepp drain worker-0 --timeout 10m && systemctl restart vllm && kvepp uncordon worker-0
Exit status: 0 if done (drain: no request runs), 1 if not or after --timeout, 2 for wrong usage
Precedence:  flag, variable KVEPP_<FLAG>, default

NAME is an endpoint's name in the endpoints file; for a Pod it is POD-rank-0. kvepp keeps its index
of the endpoint's cache. The cordon ends with kvepp uncordon, or when kvepp restarts. Each kvepp
process has its own cordons: with several replicas, run the command for each of them, or annotate
the Pod with kvepp/cordon=true, which all replicas follow.
`

func workerPath(name string) string { return "/workers/" + url.PathEscape(name) }

// workers writes a table of the endpoints.
func (s *server) workers(ctx context.Context, to io.Writer) error {
	var all struct{ Endpoints []admin.Endpoint }
	if err := s.get(ctx, "/workers", &all); err != nil {
		return err
	}
	_, err := to.Write(table(func(t io.Writer) {
		fmt.Fprintln(t, "NAME\tSTATE\tRUNNING\tSESSIONS\tROLE\tMODEL\tADDRESS")
		for i := range all.Endpoints {
			e := &all.Endpoints[i]
			fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%s\t%s\t%s\n", e.Name, stateOf(e), e.RunningRequests, e.Sessions,
				cmp.Or(e.Role, "-"), cmp.Or(e.Model, "-"), cmp.Or(e.Address, "-"))
		}
	}))
	return err
}

// stateOf describes whether an endpoint gets requests.
func stateOf(e *admin.Endpoint) string {
	var parts []string
	if !e.InPool {
		parts = append(parts, "not in the pool")
	}
	for _, c := range admin.ConditionsOf(e) {
		if e.Cordon != nil && c.State == e.Cordon.As {
			parts = append(parts, fmt.Sprintf("%s (%s)", c.State, strings.Join(e.Cordon.By, ", ")))
		} else {
			parts = append(parts, c.State+": "+c.Detail)
		}
	}
	if len(parts) == 0 {
		return "serving"
	}
	return strings.Join(parts, "; ")
}

// runningText returns the number of running requests as text.
func runningText(n int) string {
	switch n {
	case 0:
		return "no request runs"
	case 1:
		return "1 request runs"
	}
	return fmt.Sprintf("%d requests run", n)
}

// change cordons or uncordons an endpoint.
func (s *server) change(ctx context.Context, name, change string, to io.Writer) error {
	var e admin.Endpoint
	if err := s.ask(ctx, http.MethodPost, workerPath(name)+"/"+change, nil, nil, &e); err != nil {
		return err
	}
	if change == "uncordon" && e.Cordon != nil {
		return fmt.Errorf("%s still gets no new requests: it is cordoned by the %s, where you can end that "+
			"(docs/operations.md)", name, strings.Join(e.Cordon.By, " and the "))
	}
	_, err := fmt.Fprintf(to, "%s: %s, %s\n", name, stateOf(&e), runningText(e.RunningRequests))
	return err
}

const (
	progressInterval = 10 * time.Second // longest time without a progress line
	failurePatience  = 15 * time.Second // how long requests to kvepp may fail before drain gives up
)

// drain drains an endpoint, and returns when no request runs on it; it looks every poll. An error includes the number
// of running requests.
func (s *server) drain(ctx context.Context, name string, timeout, poll time.Duration, to, progress io.Writer) error {
	start := time.Now()
	elapsed := func() time.Duration { return time.Since(start).Round(time.Second) }
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	var e admin.Endpoint
	if err := s.ask(ctx, http.MethodPost, workerPath(name)+"/drain", nil, nil, &e); err != nil {
		return err
	}
	reported, reportedAt, reachedAt := -1, start, start
	for {
		switch {
		case !e.InPool:
			return fmt.Errorf("%s has left the pool: kvepp cannot count its running requests any more. Look at the "+
				"engine itself before you stop it", name)
		case e.Cordon == nil || !slices.Contains(e.Cordon.By, admin.Operator):
			return fmt.Errorf("%s is not cordoned any more, and %s on it: kvepp has restarted, or an operator has "+
				"uncordoned it. Drain it again", name, runningText(e.RunningRequests))
		case e.RunningRequests == 0:
			fmt.Fprintf(to, "%s: drained after %v, no request runs. \"kvepp uncordon %s\" brings it back.\n", name,
				elapsed(), name)
			return nil
		}
		if e.RunningRequests != reported || time.Since(reportedAt) >= progressInterval {
			reported, reportedAt = e.RunningRequests, time.Now()
			fmt.Fprintf(progress, "%s: %s, %s after %v\n", name, eject.Draining, runningText(reported), elapsed())
		}
		select {
		case <-ctx.Done():
			why := "interrupted"
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				why = "--timeout is over"
			}
			return fmt.Errorf("%s after %v: %s on %s. It stays cordoned: drain it again to wait further, stop the "+
				"engine to break them off, or bring it back with \"kvepp uncordon %s\"", why, elapsed(),
				runningText(e.RunningRequests), name, name)
		case <-time.After(poll):
		}
		var now admin.Endpoint
		switch err := s.get(ctx, workerPath(name), &now); {
		case err == nil:
			e, reachedAt = now, time.Now()
		case ctx.Err() != nil: // reported above
		case !errors.Is(err, errUnreachable), time.Since(reachedAt) > failurePatience:
			return fmt.Errorf("%w. When it was last reached, %s on %s", err, runningText(e.RunningRequests), name)
		}
	}
}
